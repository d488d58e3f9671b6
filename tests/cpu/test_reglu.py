"""``relu(gate) * up`` as one operator: torch's bits up to second derivatives, and where layers use it."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activations import DTYPES, dense_layer, every_value, plain, same_bits
from torch import Tensor

import twell
from twell import testing
from twell.base.activation import RELU, activation_of
from twell.call import autograd
from twell.choose import tuning
from twell.runtime import device, geometry, modes, resolve, specs

BF16, FP16 = torch.bfloat16, torch.float16


@DTYPES
def test_kernels_get_the_arguments_that_they_are_compiled_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands become vectors, in place if possible, else copied. Empty tensors launch nothing."""
    launches: list[tuple[specs.Spec, tuple[Any, ...]]] = []
    module: Any = sys.modules["twell.ops.reglu"]
    monkeypatch.setattr(module, "launch", lambda spec, *arguments: launches.append((spec, arguments)))
    base = torch.zeros(3, 7, 9, dtype=dtype)
    dh, gate, up = base[0], base.transpose(1, 2)[1].contiguous().t(), torch.zeros(64, dtype=dtype)[1:].view(7, 9)
    hidden = module.on_cuda(gate, up, activation_of("relu2"))
    gradients = module._backward_cuda(dh, gate, up, "fatrelu", 1.0)
    assert [spec for spec, _ in launches] == [tuning.reglu(dtype, backward=b) for b in (False, True)]
    one = {BF16: 0x3F803F80, FP16: 0x3C003C00}[dtype]
    assert [arguments[-2:] for _, arguments in launches] == [(geometry.ACTIVATIONS["relu2"], 0), (0, one)]
    # one row of all values
    assert launches[0][1][3:5] == (module.PIECE, 0)
    forward, backward = launches[0][1][:3], launches[1][1][:-2]
    assert [t.shape for t in (*forward, *backward)] == [(63,)] * 8
    assert all(t.is_contiguous() for t in (*forward, *backward))
    assert all(t.data_ptr() % 16 == 0 for t in (*forward, *backward))
    assert backward[0].data_ptr() == dh.data_ptr()
    written = [forward[-1], *backward[-2:]]
    assert [t.data_ptr() for t in written] == [t.data_ptr() for t in (hidden, *gradients)]
    module.on_cuda(gate[:0], up[:0]), module._backward_cuda(dh[:0], gate[:0], up[:0], "relu", 0.0)
    assert len(launches) == 2


def test_kernels_read_halves_of_one_product_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    module: Any = sys.modules["twell.ops.reglu"]
    monkeypatch.setattr(module, "launch", lambda spec, *arguments: launches.append(arguments))
    merged = torch.zeros(5, 48, dtype=BF16)
    gate, up = merged.chunk(2, 1)
    hidden = module.on_cuda(gate, up)
    first, second, written, width, stride = launches[0][:5]
    assert (len(launches), width, stride) == (1, 24, 48)
    assert [t.data_ptr() for t in (first, second, written)] == [t.data_ptr() for t in (gate, up, hidden)]
    # each ends with the last value of its half
    assert first.shape == second.shape == (4 * 48 + 24,)
    copied = [
        (merged[:, :20], merged[:, 24:44]),  # no whole vectors
        (merged[:, 1:25], merged[:, 24:]),  # not aligned
        (gate, up.contiguous()),
        (merged.view(5, 2, 24)[:, 0, ::2], merged.view(5, 2, 24)[:, 1, ::2]),
    ]
    for gate, up in copied:
        module.on_cuda(gate, up)
        assert launches[-1][3:5] == (module.PIECE, 0)
        assert launches[-1][0].shape == launches[-1][2].shape == (gate.numel(),)


@pytest.mark.parametrize("m", [1, tuning.MERGED_TOKENS, tuning.MERGED_TOKENS + 1])
def test_weights_that_are_one_make_one_product(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    linear, close = F.linear, functools.partial(torch.testing.assert_close, rtol=2**-7, atol=2**-4)
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: rows.append(len(w)) or linear(x, w, b))
    x, merged, w_down = (torch.randn(shape).to(BF16) for shape in ((m, 16), (48, 16), (24, 16)))
    w_gate, w_up = merged.chunk(2)
    apart = [(w_gate.clone(), w_up), (w_up, w_gate), (merged[:16], merged[24:40]), (merged[::2], merged[1::2])]
    few = m <= tuning.MERGED_TOKENS
    for gate, up, one in [(w_gate, w_up, few), *((*pair, False) for pair in apart)]:
        rows.clear()
        y = torch.ops.twell.ffn(x, gate, up, w_down[: len(gate)], None, None, None, 8, "dense", None)
        assert rows[:-1] == ([2 * len(gate)] if one else [len(gate)] * 2)
        close(y, plain(x @ gate.t(), x @ up.t()) @ w_down[: len(gate)])
    rows.clear()
    bias = torch.randn(24).to(BF16)
    y = torch.ops.twell.ffn(x, w_gate, w_up, w_down, bias, None, None, 8, "dense", None)
    assert rows[:-1] == [24, 24]
    close(y, plain(F.linear(x, w_gate, bias), x @ w_up.t()) @ w_down)


# With gradients


@DTYPES
@pytest.mark.parametrize("name", ["relu", "drelu", "fatrelu"])
@pytest.mark.parametrize(
    ("needed", "create_graph"), [((True, True), False), ((True, False), True), ((False, True), False)]
)
def test_gradients_have_the_bits_of_torch_for_every_gate(
    dtype: torch.dtype, name: Any, needed: tuple[bool, bool], create_graph: bool
) -> None:
    dh, gate, up = every_value(dtype)
    activation = activation_of(name, 1.3 if name == "fatrelu" else 0.0)

    def by_torch(gate: Tensor, up: Tensor) -> Tensor:
        if name == "relu":
            return plain(gate, up)
        return F.threshold(gate, activation.threshold, 0.0) * (F.relu(up) if name == "drelu" else up)

    found = []
    for f in (lambda gate, up: autograd.gated_relu(gate, up, activation), by_torch):
        leaves = [t.clone().requires_grad_(need) for t, need in zip((gate, up), needed)]
        wanted = [t for t in leaves if t.requires_grad]
        hidden = f(*leaves)
        found.append((hidden.detach(), *torch.autograd.grad(hidden, wanted, dh, create_graph=create_graph)))
    for ours, theirs in zip(*found, strict=True):
        assert ours.requires_grad == theirs.requires_grad
        testing.assert_same(ours.detach(), theirs.detach())
        # zeros of ReLU have torch's sign, too
        assert name != "relu" or same_bits(ours.detach(), theirs.detach())


# In layers


@contextmanager
def fusing(monkeypatch: pytest.MonkeyPatch, fuse: bool = True) -> Iterator[list[int]]:
    """Let dense layers use the fused operator on the CPU too; record its calls."""
    calls: list[int] = []
    fused = autograd.gated_relu

    def counted(gate: Tensor, up: Tensor, *activation: Any) -> Tensor:
        calls.append(gate.numel())
        return fused(gate, up, *activation)

    with monkeypatch.context() as patch:
        patch.setattr(autograd, "fuses", lambda gate, activation, operands: fuse)
        patch.setattr(autograd, "gated_relu", counted)
        yield calls


def draw(m: int = 9, n: int = 264, k: int = 32, dtype: torch.dtype = BF16) -> testing.FFN:
    tensors = (torch.randn(*shape) / 4 for shape in ((m, k), (n, k), (n, k), (n, k), (n,), (n,), (k,)))
    return testing.FFN(*(t.to(dtype) for t in tensors))


@pytest.mark.parametrize("fuse", [False, True])
def test_figures_count_what_fires(fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN gate is a non-zero."""
    p = draw(130)
    p.x[5, 5] = torch.nan
    with fusing(monkeypatch, fuse):
        _, aux = dense_layer(p, return_aux=True)
    assert aux.l0 == (F.relu(F.linear(p.x, p.w_gate, p.b_gate)) != 0).sum() / 130


# Where it is used


def stand_in(**changes: Any) -> Any:
    """A gate that ``fuses`` takes for one on a GPU."""
    fields = {"is_cuda": True, "dtype": BF16, "device": torch.device("cuda:0")} | changes
    elements = fields.pop("elements", tuning.FUSED_ELEMENTS)
    return SimpleNamespace(numel=lambda: elements, **fields)


def test_large_plain_gates_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    capturing = False
    monkeypatch.setattr(resolve, "launchable", lambda *question: asked.append(question) or True)
    monkeypatch.setattr(modes, "stream_captures", lambda: capturing)
    operands = [torch.zeros(2), torch.nn.Parameter(torch.zeros(2))]
    assert autograd.fuses(stand_in(), RELU, operands)
    assert asked == [(0, tuning.reglu(BF16, backward=False), tuning.reglu(BF16, backward=True))]
    assert autograd.fuses(stand_in(dtype=FP16), RELU, operands)
    assert not autograd.fuses(stand_in(is_cuda=False), RELU, operands)
    of_neurons = activation_of("fatrelu", torch.ones(8), by_neuron=True)
    assert not autograd.fuses(stand_in(), of_neurons, operands)
    assert not autograd.fuses(stand_in(dtype=torch.float32), RELU, operands)
    few = stand_in(elements=tuning.FUSED_ELEMENTS - 1)
    assert not autograd.fuses(few, RELU, operands)
    capturing = True
    assert autograd.fuses(few, RELU, operands)
    monkeypatch.setattr(resolve, "launchable", lambda *question: False)
    assert not autograd.fuses(stand_in(), RELU, operands)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_layer_without_gate_works_in_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """ReLU overwrites the first product if no gradient needs it, and never a user's tensor."""
    p = draw(7, dtype=dtype)
    p.x[1, 2], p.w_gate[3], p.b_gate[3] = torch.nan, 0, -0.0
    before = p.map(Tensor.clone)
    relu, in_place = F.relu, []

    def watched(t: Tensor, inplace: bool = False) -> Tensor:
        in_place.append(inplace)
        return relu(t, inplace=inplace)

    monkeypatch.setattr(F, "relu", watched)
    hidden = relu(F.linear(p.x, p.w_gate, p.b_gate))
    expected = F.linear(hidden, p.w_down.t())
    call = lambda x, **options: twell.sparse_ffn(  # noqa: E731
        x, p.w_gate, p.w_down.t(), b_up=p.b_gate, strategy="dense", **options
    )
    y, aux = call(p.x, return_aux=True)
    assert same_bits(y, expected)
    assert aux.l0 == (hidden != 0).sum() / 7
    leaf = p.x.clone().requires_grad_()
    assert same_bits(call(leaf).detach(), expected)
    with torch.no_grad():
        assert same_bits(call(leaf), expected)
    assert in_place == [True, False, True]
    for tensor, was in zip(p, before, strict=True):
        assert same_bits(tensor, was)


def test_without_kernels_dense_layers_do_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing kernel is looked for and logged once; one that a capture could not load is loaded later."""
    spec = tuning.reglu(BF16, backward=False)
    monkeypatch.setattr(resolve, "_kernels", {})
    monkeypatch.setattr(resolve, "_missing", set())
    capturing, looked = True, []

    def find(spec: specs.Spec, arch: str) -> Callable[..., None]:
        looked.append(spec)
        if len(looked) < 3:
            raise RuntimeError("nowhere")
        return print

    monkeypatch.setattr(resolve, "_find", find)
    monkeypatch.setattr(resolve, "_capturing", lambda: capturing)
    assert not resolve.obtainable(spec)
    assert not caplog.records
    capturing = False
    assert [resolve.obtainable(spec) for _ in range(3)] == [False] * 3
    assert len(looked) == 2
    assert [record.getMessage() for record in caplog.records] == ["continuing without kernel reglu_bf16: nowhere"]
    other = tuning.reglu(FP16, backward=False)
    assert [resolve.obtainable(other) for _ in range(2)] == [True] * 2
    assert len(looked) == 3

    monkeypatch.setattr(device, "capability", lambda index: (9, 0) if index else (7, 5))
    assert resolve.launchable(1, other)
    assert not resolve.launchable(1, other, spec)
    assert not resolve.launchable(0, other)

    def no_bindings(index: int) -> tuple[int, int]:
        raise RuntimeError("cuda.bindings is not usable")

    monkeypatch.setattr(device, "capability", no_bindings)
    assert not resolve.launchable(1, other)
