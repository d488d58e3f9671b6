"""``torch.ops.twell``: the CPU implementations equal the reference, the fakes tell the truth, the contract holds."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import programs
from tests.cases.verdicts import verdict
from tests.cpu.fake_gpu import FakeGpu
from twell import ops
from twell.runtime import geometry
from twell.runtime.log import warn_once
from twell.testing.case import Case

BF16 = torch.bfloat16


def integers(*shape: int, dtype: torch.dtype = BF16, low: int = -2, high: int = 3) -> Tensor:
    return torch.randint(low, high, shape).to(dtype)


def operands(m: int, n: int, k: int, dtype: torch.dtype = BF16, bias: bool = False) -> dict[str, Tensor | None]:
    sizes = {
        "x": (m, k),
        "w_gate": (n, k),
        "w_up": (n, k),
        "w_down": (n, k),
        "b_gate": (n,),
        "b_up": (n,),
        "b_down": (k,),
    }
    return {name: integers(*size, dtype=dtype) if bias or name[0] != "b" else None for name, size in sizes.items()}


def bounds_of(o: dict[str, Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """A level of each neuron, and a bound below and above it."""
    level = (torch.arange(len(o["w_gate"])) % 4).to(o["x"].dtype)
    return level, level - 2, level + 3


def gate_of(o: dict[str, Tensor | None]) -> Tensor:
    gate = o["x"].float() @ o["w_gate"].float().t()
    return (gate if o["b_gate"] is None else gate + o["b_gate"].float()).to(o["x"].dtype)


def equal(a: Any, b: Any) -> bool:
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
    return all(p.dtype == q.dtype and torch.equal(p, q) for p, q in pairs)


def test_a_word_reads_back_with_all_of_its_bits() -> None:
    """A NaN with the sign bit set, and the largest neuron: neither may change the other half of the word."""
    words, spill = torch.zeros(1, 256 * 32, dtype=torch.int32), torch.zeros(1, 65536, dtype=BF16)
    words[0, 255 * 32], words[0, 255 * 32 + 1] = 1, -64 << 16 | 65535
    dense = ops.unpack(words, spill, 65536, 8)
    assert dense.view(torch.int16)[0, 65535] == -64
    assert not dense[0, :65535].any()


def test_opcheck() -> None:
    """The habits ask it of tokens and of the operators that calls reach; here are none, and the others."""
    alone = ops.reglu, ops.reglu_backward, ops.matrix_transpose, ops.window, ops.hybrid_backward_accumulate
    given = [(op, arguments) for op, arguments in checked_calls() if op in alone]
    for op, arguments in given + [(op, arguments) for op, arguments in checked_calls(0) if op not in alone]:
        if not any(isinstance(a, Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments.values()):
            torch.library.opcheck(op, tuple(arguments.values()))


def test_an_input_that_requires_grad_is_refused_by_name_of_the_function_to_call() -> None:
    for op, arguments in ((op, tuple(named.values())) for op, named in checked_calls() if is_of_layers(op)):
        needing = [
            a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments
        ]
        with pytest.raises(NotImplementedError, match=r"expected no input that requires grad.*call a function"):
            op(*needing)
        with torch.no_grad():
            assert equal(op(*needing), op(*arguments))
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(NotImplementedError, match="requires grad"):
            op(*needing)


def is_of_layers(op: Any) -> bool:
    """Whether it stands in for a function of layers, and refuses gradients."""
    return not any(word in op._opname for word in ("reglu", "experts"))


def misfits(arguments: dict[str, Any]) -> list[tuple[str, type[Exception], Any]]:
    """Yield (name, error, operand) for operands that do not fit the others."""
    found: list[tuple[str, type[Exception], Any]] = []
    for name, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            continue
        found.append((name, ValueError, tensor[None]))
        if tensor.dim() and name != "matrix":
            # one column, or one value, less
            found.append((name, ValueError, tensor.narrow(-1, 0, tensor.shape[-1] - 1)))
        if name not in ("matrix", "ids"):
            found.append((name, TypeError, tensor.to(torch.int64 if not tensor.is_floating_point() else torch.float64)))
    return found


def checked_calls(m: int = 130) -> list[tuple[Any, dict[str, Any]]]:
    """Return (operator, arguments by name) of every operator, with all optional operands."""
    o = operands(m, 264, 16, bias=True)
    pack = o["x"], o["w_gate"], o["b_gate"], 8
    found: list[tuple[Any, tuple[Any, ...]]] = [(ops.gate_pack, pack), (ops.window, (gate_of(o), *bounds_of(o)))]
    found += [(ops.unpack, (*ops.gate_pack(*pack)[:2], 264, 8)), (ops.matrix_transpose, (o["w_down"],))]
    for w_up, b_up, x in ((o["w_up"], o["b_up"], o["x"]), (None, None, None)):
        for op, strategy in itertools.product((ops.ffn_aux, ops.ffn), ("row", "union")):
            found.append(
                (op, (o["x"], o["w_gate"], w_up, o["w_down"], o["b_gate"], b_up, o["b_down"], 8, strategy, None))
            )
            behind = x, None, w_up, o["w_down"], None, b_up, o["b_down"], 8, strategy, None, "relu", 0.0, False, False
            found.append((op, (*behind, gate_of(o))))
    layer = (*(o[name] for name in ("x", "w_gate", "w_up", "w_down", "b_gate", "b_up")),)
    forward = (*layer, o["b_down"], 8, 0)
    _, l1, _, *kept = ops.hybrid_forward(*forward)
    saved = (o["x"].clone(), torch.zeros_like(l1), *layer, *kept)
    mains = [torch.zeros(264, 16) for _ in range(3)]
    found += [(ops.hybrid_forward, forward), (ops.hybrid_backward, (*saved, True, True))]
    found += [(ops.hybrid_backward_accumulate, (*saved, *mains, True)), (ops.reglu, (o["x"], o["x"].clone()))]
    given = o["x"], None, o["w_up"], o["w_down"], None, o["b_up"]
    forward = (*given, o["b_down"], 8, 0, "relu", 0.0, False, gate_of(o))
    _, l1, _, kept = ops.hybrid_forward(*forward)
    behind = (o["x"].clone(), torch.zeros_like(l1), *given, kept, True, True, "relu", 0.0, 0, gate_of(o), True)
    found += [(ops.hybrid_forward, forward), (ops.hybrid_backward, behind)]
    found.append((ops.reglu_backward, (o["x"].clone(), o["x"], o["x"].clone())))
    stacked = (o[name].repeat(2, 1, 1) for name in ("w_gate", "w_up", "w_down"))
    ids, weights = torch.zeros(m, 2, dtype=torch.int32), torch.zeros(m, 2)
    found.append((ops.experts, (o["x"], *stacked, ids, weights, 8, "row")))
    e4m3, by_rows = torch.float8_e4m3fn, torch.ones(264)
    half = o["w_gate"].to(e4m3), by_rows, o["w_up"].to(e4m3), by_rows, o["w_down"].to(e4m3), torch.ones(16)
    scaled = o["x"].to(e4m3), *half[::2], *(o[name] for name in ("b_gate", "b_up", "b_down"))
    how = 8, "row", None, "relu", 0.0, False, False, None
    found.append((ops.ffn, (*scaled, *how, torch.ones(m), *half[1::2])))
    # scales are of each expert
    triple = [operand[None].repeat(2, *[1] * operand.dim()) for operand in half]
    how = 8, "dense", "relu", 0.0, False, None, None, None
    found.append((ops.experts, (o["x"], *triple[::2], ids, weights, *how, *triple[1::2])))
    names = [[argument.name for argument in op._schema.arguments] for op, _ in found]
    # those with defaults, of the activation, are left out
    return [(op, dict(zip(each, arguments))) for each, (op, arguments) in zip(names, found)]


@pytest.mark.parametrize("fake", [False, True])
def test_operands_that_do_not_fit_each_other_are_refused_by_name(fake: bool) -> None:
    """Each operand of each operator with a wrong dimension, value or dtype, real and fake."""
    tried = {op._opname for op, _ in checked_calls()}
    assert tried == set(ops.__all__)
    for op, arguments in checked_calls():
        for name, error, operand in misfits(arguments):
            given = (arguments | {name: operand}).values()
            with pytest.raises(error, match=r" must (be|have) .*, got "):  # noqa: PT012
                if fake:
                    with FakeTensorMode() as mode:
                        op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in given))
                op(*given)
                pytest.fail(f"{op._opname} takes {name} {operand.dtype} {list(operand.shape)}")


def test_an_operand_on_meta_among_others_is_refused() -> None:
    """torch answers such a call by the fake, whose outputs would be uninitialised memory."""
    for op, arguments in checked_calls():
        tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
        for name in tensors if len(tensors) > 1 else ():
            given = (arguments | {name: arguments[name].to("meta")}).values()
            with pytest.raises((ValueError, TypeError, RuntimeError), match=r"must be on one device, got cpu and meta"):
                op(*given)


def test_sizes_and_dtypes_that_kernels_do_not_take_are_refused() -> None:
    """All operands change at once, so they fit each other."""
    for k, n, dtype, text in ((63, 64, BF16, "multiple of 8 values"), (64, 60, BF16, "multiple of 8 rows")):
        o = operands(3, n, k, dtype=dtype)
        for op, how in ((ops.ffn, ("union", None)), (ops.hybrid_forward, ())):
            with pytest.raises(ValueError, match=text):
                op(o["x"], o["w_gate"], o["w_up"], o["w_down"], None, None, None, 8, *how)
        with pytest.raises(ValueError, match=text):
            ops.gate_pack(o["x"], o["w_gate"], None, 8)
    with pytest.raises(ValueError, match="n must be a multiple of 8, got 60"):
        ops.unpack(*ops.gate_pack(*(operands(3, 64, 64)[name] for name in ("x", "w_gate")), None, 8)[:2], 60, 8)
    for op, arguments in checked_calls():
        others = "matrix_transpose", "window", "reglu", "hybrid", "ward"
        if any(word in op._opname for word in others):
            continue
        given = [a.float() if isinstance(a, Tensor) and a.dtype == BF16 else a for a in arguments.values()]
        with pytest.raises(TypeError, match=r"must be (torch\.)?bfloat16(,? or .*)?, got torch\.float32"):
            op(*given)


@pytest.mark.parametrize("gated", [True, False])
def test_a_slice_is_packed_just_before_it_is_used(gated: bool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """All slices use the same words and spill; statistics are parts of one tensor."""
    monkeypatch.setattr(geometry, "UNION_ENTRIES", 2 * 128 * 520)
    o = operands(650, 520, 16, bias=True)
    weights = (o["w_up"] if gated else None, o["w_down"], o["b_gate"], o["b_up"] if gated else None)
    y, l1, stats, union = programs.union_layer((o["x"], o["w_gate"], *weights, o["b_down"]))
    assert (y.shape, l1.shape, stats.shape, union.shape) == ((650, 16), (6, 128), (82, 3, 2), (6,))
    per_slice = ["gate_pack", "compact", "sampled_up", "gathered"] if gated else ["gate_pack", "compact", "gathered"]
    assert gpu.names() == per_slice * 3
    packs = [a for spec, a in gpu.launches if spec.op == "gate_pack"]
    compacts = [a for spec, a in gpu.launches if spec.op == "compact"]
    for i, (rows, blocks) in enumerate(((256, 32), (256, 32), (138, 18))):
        x, _, bias, words, spill, figures = packs[i][:6]
        assert x.data_ptr() == o["x"][256 * i :].data_ptr()
        assert len(x) == len(words) == len(spill) == rows
        assert bias.data_ptr() == o["b_gate"].data_ptr()
        assert figures.data_ptr() == stats[32 * i :].data_ptr()
        assert len(figures) == blocks
        assert words.data_ptr() == packs[0][3].data_ptr() == compacts[i][0].data_ptr()
        assert spill.data_ptr() == packs[0][4].data_ptr() == compacts[i][1].data_ptr()


@pytest.mark.parametrize("more", ["biases=gate+up+down", "gated=False biases=up+down", "activation=relu2"])
def test_many_tokens_are_taken_slice_by_slice(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "UNION_ENTRIES", 2 * 128 * 520)
    assert verdict(Case.of(f"layer m=650 k=24 n=520 {more} strategy=union aux=True")) == "ok"


def test_a_down_weight_in_the_other_layout_is_copied_and_logged_once(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    o = operands(5, 264, 16)
    rows, copied = o["w_down"], []
    # as nn.Linear stores it, [K, N], by rows of neurons, and two layouts that no kernel reads
    layouts = (rows.t().contiguous().t(), rows, rows.repeat_interleave(2, 1)[:, ::2], misaligned(rows))
    for w_down in layouts:
        gpu.clear()
        programs.union_layer((o["x"], o["w_gate"], o["w_up"], w_down))
        copied.append(gpu.names().count("matrix_transpose"))
        read = gpu.launches[-1][1][1]
        assert read.shape == rows.shape
        assert read.is_contiguous()
        assert (read.data_ptr() == rows.data_ptr()) == (w_down is rows)
    # torch's operators copy what the kernel does not read
    assert copied == [1, 0, 0, 0]
    # once, with what the user can do about it
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert 'twell.nn.set_down_layout(model, "rows")' in caplog.text


def misaligned(matrix: Tensor) -> Tensor:
    base = torch.empty(matrix.numel() + 1, dtype=matrix.dtype)
    return base[1:].view(matrix.shape).copy_(matrix)


def test_operators_take_thresholds_with_any_activation() -> None:
    """Kernels square what is left, so the CPU does."""
    o, level = operands(21, 264, 72, bias=True), (torch.arange(264) % 5).to(BF16)
    gate = torch.nn.functional.linear(*(o[name].double() for name in ("x", "w_gate", "b_gate")))
    right = torch.where(gate > level, gate, 0).square() @ o["w_down"].double()
    both = torch.cat([o["b_gate"], level])
    y = ops.ffn(o["x"], o["w_gate"], None, o["w_down"], both, None, None, 8, "union", None, "relu2")
    assert (y.double() - right).norm() <= 1e-2 * right.norm()
