"""The functions users call: results, limits, errors, autocast, strides and compiling."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import twell
from twell import _modes, testing, tuning
from twell._admission import admitted
from twell._runtime import log
from twell._runtime.log import warn_once
from twell.ops.operands import Operands

BF16 = torch.bfloat16


def gated(problem: testing.FFN, **options: Any) -> Any:
    biases = {"b_gate": problem.b_gate, "b_up": problem.b_up, "b_down": problem.b_down}
    return twell.sparse_gated_ffn(*problem[:3], problem.w_down.t(), **biases, **{"strategy": "row", **options})


def plain(problem: testing.FFN, **options: Any) -> Any:
    biases = {"b_up": problem.b_gate, "b_down": problem.b_down}
    return twell.sparse_ffn(problem.x, problem.w_gate, problem.w_down.t(), **biases, **{"strategy": "row", **options})


BOTH = pytest.mark.parametrize("ffn", [gated, plain])


def real_problem(m: int, n: int, k: int, dtype: torch.dtype, bias: bool = False) -> testing.FFN:
    """Normal values with about a tenth of the gate positive."""
    w = [torch.randn(n, k) / k**0.5 for _ in range(3)]
    x = torch.randn(m, k)
    x[:, 0], w[0][:, 0] = 1.0, -1.3
    biases = (torch.randn(n) / 4, torch.randn(n), torch.randn(k)) if bias else (None, None, None)
    return testing.FFN(x, *w, *biases).map(lambda t: t.to(dtype))


@BOTH
@pytest.mark.parametrize("strategy", ["auto", "row", "union"])
@pytest.mark.parametrize(
    ("compression", "density", "biases"),
    [(2, 0.05, "gate up down"), (4, 1.0, "down"), (8, 0.0, "up"), (8, 0.05, "")],
)
def test_exact_on_integers(
    ffn: Callable[..., Any], strategy: str, compression: int, density: float, biases: str
) -> None:
    problem = testing.integer_problem(67, 24, 520, density=density, biases=biases)
    # all but "row" without gradients round h
    right = {rounded: testing.exact_output(problem, gated=ffn is gated, rounded=rounded) for rounded in (False, True)}
    gate = hidden = testing.float64_gate(problem)
    if ffn is gated:
        b_up = None if problem.b_up is None else problem.b_up.double()
        hidden = gate * F.linear(problem.x.double(), problem.w_up.double(), b_up)
    # with a gradient in any mode, and leading dimensions
    problem.w_down.requires_grad_()
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            rounded = strategy != "row" or torch.is_grad_enabled()
            for lead in ((67,), (1, 67), (67, 1, 1)):
                y, aux = ffn(
                    problem._replace(x=problem.x.view(*lead, 24)),
                    compression=compression,
                    strategy=strategy,
                    return_aux=True,
                )
                assert y.shape == (*lead, 24)
                assert torch.equal(y.view(67, 24), right[rounded])
                assert [(figure.dtype, figure.shape) for figure in aux] == [(torch.float32, ())] * 2
                assert aux.l0 == (gate != 0).sum() / 67
                assert aux.l1.item() == pytest.approx(hidden.abs().sum().item() / 67, rel=1e-2 if rounded else 1e-6)


@BOTH
@pytest.mark.parametrize(("dtype", "bias"), [(BF16, True), (torch.float16, False)])
def test_as_close_to_float64_as_dense_is(ffn: Callable[..., Any], dtype: torch.dtype, bias: bool) -> None:
    problem = real_problem(64, 520, 128, dtype, bias)
    comparison = testing.compare(problem, ffn(problem), gated=ffn is gated)
    assert comparison.ok, comparison


@BOTH
@pytest.mark.parametrize(("strategy", "dtype"), [("auto", torch.float32), ("union", torch.float64)])
def test_wider_dtypes_on_the_cpu_are_dense(ffn: Callable[..., Any], strategy: str, dtype: torch.dtype) -> None:
    problem = real_problem(5, 264, 32, dtype)
    assert torch.equal(ffn(problem, strategy=strategy), ffn(problem, strategy="dense"))


def test_that_wider_dtypes_are_dense_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log.info_once.cache_clear()
    wide, narrow = (real_problem(5, 264, 32, dtype) for dtype in (torch.float32, BF16))
    with caplog.at_level(logging.INFO, logger="twell"):
        for strategy in ("auto", "dense"):
            gated(wide, strategy=strategy)
        gated(narrow)
        assert not caplog.records
        for _ in range(2):
            gated(wide)
            plain(wide, strategy="union")
    assert [r.getMessage() for r in caplog.records] == [
        "inference in float32 and float64 runs dense, whatever strategy was named"
    ]


@BOTH
@pytest.mark.parametrize("strategy", ["auto", "dense"])
def test_autocast_casts_all_operands(ffn: Callable[..., Any], strategy: str) -> None:
    problem = real_problem(5, 264, 32, torch.float32, bias=True)
    with torch.autocast("cpu", dtype=BF16):
        y, aux = ffn(problem, strategy=strategy, return_aux=True)
        mixed = ffn(problem._replace(x=problem.x.to(BF16)), strategy=strategy)
    expected, expected_aux = ffn(problem.map(lambda t: t.to(BF16)), strategy=strategy, return_aux=True)
    assert y.dtype == BF16
    assert torch.equal(y, expected)
    assert torch.equal(mixed, expected)
    assert aux.l1.dtype == torch.float32
    assert aux == expected_aux


@BOTH
def test_shapes_on_cuda_without_a_gpu(ffn: Callable[..., Any]) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 5, 64, dtype=BF16, device="cuda")
        w = [torch.empty(264, 64, dtype=BF16, device="cuda") for _ in range(3)]
        y, aux = ffn(testing.FFN(x, *w), return_aux=True)
        assert (y.shape, y.dtype, y.device.type) == (x.shape, BF16, "cuda")
        assert aux.l1.shape == aux.l0.shape == ()
        assert aux.l1.device.type == "cuda"
        with pytest.raises(TypeError, match=r"dtype must be bfloat16 or float16 .*got torch.float32 on cuda"):
            ffn(testing.FFN(x, *w).map(lambda t: t.float()))


def shaped(**changes: Any) -> dict[str, Any]:
    """Arguments of the gated function: K = 16, N = 24."""
    shapes = {"x": (3, 16), "w_gate": (24, 16), "w_up": (24, 16), "w_down": (16, 24)}
    return {name: torch.zeros(shape, dtype=BF16) for name, shape in shapes.items()} | changes


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
        ({"w_up": None}, TypeError, "w_up must be a tensor, got NoneType"),
        ({"b_up": 1.0}, TypeError, "b_up must be a tensor, got float"),
        ({"x": torch.zeros((), dtype=BF16)}, ValueError, r"x must be \[..., K\], got a scalar"),
        ({"x": torch.zeros(3, 16, dtype=torch.int32)}, TypeError, "x must have a floating dtype, got torch.int32"),
        ({"w_gate": torch.zeros(24, dtype=BF16)}, ValueError, r"first weight must be \[N, K\], got \[24\]"),
        ({"x": torch.zeros(3, 8, dtype=BF16)}, ValueError, r"x must be \[..., 16\] .*K = 16, N = 24.*got \[3, 8\]"),
        ({"w_down": torch.zeros(24, 16, dtype=BF16)}, ValueError, r"w_down must be \[16, 24\] .*got \[24, 16\]"),
        ({"b_gate": torch.zeros(16, dtype=BF16)}, ValueError, r"b_gate must be \[24\] .*got \[16\]"),
        ({"b_down": torch.zeros(24, dtype=BF16)}, ValueError, r"b_down must be \[16\] .*got \[24\]"),
        ({"w_up": torch.zeros(24, 16)}, TypeError, "w_up must be torch.bfloat16 as x is, got torch.float32"),
        ({"w_gate": torch.zeros(24, 16).half()}, TypeError, "w_gate must be torch.bfloat16 as x is, got torch.float16"),
        ({"w_up": torch.zeros(24, 16, dtype=BF16, device="meta")}, ValueError, "w_up must be on cpu as x is, got meta"),
        ({"compression": 3}, ValueError, r"compression must be one of \(2, 4, 8\), got 3"),
        (
            {"strategy": "fast"},
            ValueError,
            'strategy must be "auto", "dense", "row" or "union", got \'fast\'',
        ),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    for strategy in ("auto", "row", "union", "dense"):
        with pytest.raises(error, match=text):
            twell.sparse_gated_ffn(**{"strategy": strategy, **shaped(**changes)})


@BOTH
@pytest.mark.parametrize(
    ("n", "k", "error", "text"),
    [
        (24, 12, ValueError, "K must be a positive multiple of 8 for the sparse kernels, got 12"),
        (12, 16, ValueError, "N must be a positive multiple of 8 for the sparse kernels, got 12"),
        (0, 16, ValueError, "N must be a positive multiple of 8 for the sparse kernels, got 0"),
        (1048584, 8, NotImplementedError, "N must be at most 1048576 for the sparse kernels, got 1048584"),
        (8, 16392, NotImplementedError, "K must be at most 16384 for the sparse kernels, got 16392"),
    ],
)
def test_sizes_beyond_the_sparse_kernels(
    ffn: Callable[..., Any], n: int, k: int, error: type[Exception], text: str
) -> None:
    problem = testing.FFN(*(torch.zeros(rows, k, dtype=BF16) for rows in (2, n, n, n)))
    for strategy in ("row", "auto"):
        with pytest.raises(error, match=text + '; strategy="dense" takes it'):
            ffn(problem, strategy=strategy)
    # a packed gate has no slices
    with pytest.raises(error, match=text.replace("1048576", "65536") + "$"):
        twell.pack(problem.x, problem.w_gate)
    assert ffn(problem, strategy="dense").shape == (2, k)


def test_the_largest_sizes() -> None:
    for m, n, k in ((1, 65536, 8), (1, 8, 16384)):
        problem = testing.integer_problem(m, k, n, density=0.01)
        assert torch.equal(gated(problem), testing.exact_output(problem))


@pytest.mark.parametrize(("dtype", "where"), [(torch.float64, "meta"), (torch.float8_e4m3fn, "cpu")])
def test_other_dtypes_are_for_the_dense_strategy(dtype: torch.dtype, where: str) -> None:
    arguments = {name: t.to(where, dtype) for name, t in shaped().items()}
    with pytest.raises(TypeError, match=rf'got {dtype} on {where}; strategy="dense" takes what F.linear takes'):
        twell.sparse_gated_ffn(**arguments)


@BOTH
@pytest.mark.parametrize(
    ("strategy", "bias", "dtype"),
    [("row", True, BF16), ("union", False, BF16), ("dense", True, BF16), ("auto", False, torch.float32)],
)
def test_y_is_not_a_view(ffn: Callable[..., Any], strategy: str, bias: bool, dtype: torch.dtype) -> None:
    """FSDP2 puts hooks on outputs, and hooks on a view do not survive an in-place change."""
    problem = real_problem(12, 264, 32, dtype, bias)
    for lead in ((), (12,), (3, 4), (3, 2, 2)):
        for rows in (False, True):
            w_down = problem.w_down.t().contiguous().t() if rows else problem.w_down
            x = problem.x[0] if lead == () else problem.x.view(*lead, 32)
            for grad in (False, True):
                given = problem._replace(x=x, w_down=w_down).map(Tensor.detach)
                given.w_gate.requires_grad_(grad)
                y = ffn(given, strategy=strategy)
                assert not y._is_view()
                expected = y.detach() + 1
                y += 1
                torch.testing.assert_close(y.detach(), expected)
                if grad:
                    y.sum().backward()
                    assert given.w_gate.grad.norm() > 0


@BOTH
@pytest.mark.parametrize("strategy", ["row", "union", "dense"])
@torch.no_grad()
def test_a_jit_trace_is_for_any_number_of_tokens(ffn: Callable[..., Any], strategy: str) -> None:
    problem = real_problem(300, 264, 32, BF16, bias=True)

    def call(x: Tensor) -> Any:
        y, aux = ffn(problem._replace(x=x), strategy=strategy, return_aux=True)
        return y, aux.l1, aux.l0

    traced = torch.jit.trace(call, (problem.x,), check_trace=False)
    for m in (300, 1, 7, 129):
        assert all(map(torch.equal, traced(problem.x[:m]), call(problem.x[:m])))


class Doubled(torch.nn.Parameter):
    """A weight that changes the result of PyTorch's operators."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return 2 * result if func is F.linear else result


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is F.linear else result


@BOTH
@pytest.mark.parametrize(
    ("strategy", "operand"), [("auto", "x"), ("row", "w_gate"), ("union", "b_down"), ("row", "mode")]
)
def test_what_overrides_operators_is_not_left_out(
    ffn: Callable[..., Any], strategy: str, operand: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    problem = real_problem(5, 264, 32, BF16, bias=True)
    if operand != "mode":
        problem = problem._replace(**{operand: Doubled(getattr(problem, operand), requires_grad=False)})
    with Doubling() if operand == "mode" else nullcontext():
        y, expected = ffn(problem, strategy=strategy), ffn(problem, strategy="dense")
        assert torch.equal(y, expected)
        assert "runs dense: " in caplog.text
        if operand in ("x", "w_gate", "mode"):
            with pytest.raises(NotImplementedError, match=r"takes plain tensors, got .*Doubl"):
                twell.pack(problem.x, problem.w_gate)
        if torch.torch_version.TorchVersion(torch.__version__) < "2.12" and operand != "mode":
            # Dynamo leaves the graph at the class
            return
        torch.compiler.reset()
        # run as it is, a graph would meet the mode a second time
        backend = "aot_eager" if operand == "mode" else "eager"
        compiled = torch.compile(lambda: ffn(problem, strategy=strategy), backend=backend, fullgraph=True)
        assert torch.equal(compiled(), expected)


@BOTH
def test_modes_of_torch_and_plain_subclasses_run_as_named(
    ffn: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Named(torch.nn.Parameter):
        note = "of a framework that marks its weights"

    problem = testing.integer_problem(5, 32, 264, density=0.1)
    expected = ffn(problem)
    named = problem._replace(w_down=Named(problem.w_down, requires_grad=False))
    with torch.device("cpu"):
        assert torch.equal(ffn(problem), expected)
        assert torch.equal(ffn(named), expected)
    torch.set_default_device("meta")
    try:
        assert torch.equal(ffn(problem), expected)
    finally:
        torch.set_default_device(None)
    assert "runs dense" not in caplog.text


def test_invariant_is_for_inference() -> None:
    """Its kernels depend on the hidden size alone; a call that would need gradients is refused."""
    x, weight = torch.randn(3, 16, dtype=BF16), torch.randn(8, 16, dtype=BF16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="computes inference alone, got grad mode and operands that require"):
        twell.sparse_gated_ffn(x, weight, weight, weight.t(), invariant=True)
    with torch.no_grad():
        expected = twell.sparse_gated_ffn(x, weight, weight, weight.t(), strategy="row")
        for strategy in ("row", "auto", twell.AutoStrategy()):
            y = twell.sparse_gated_ffn(x, weight, weight, weight.t(), strategy=strategy, invariant=True)
            assert torch.equal(y, expected)
        with (
            Doubling(),
            pytest.raises(NotImplementedError, match="with invariant=True, got the TorchFunctionMode"),
        ):
            twell.sparse_gated_ffn(x, weight, weight, weight.t(), invariant=True)
        for named in ("dense", "union"):
            said = f'strategy must be "auto" or "row" with invariant=True, got "{named}"'
            with pytest.raises(ValueError, match=said):
                twell.sparse_ffn(x, weight, weight.t(), strategy=named, invariant=True)
    for k in (8, 2048, 4096, 4104, 16384):
        chosen = {
            (tuning.gate_pack(BF16, m, 5632, 66, True).op, tuning.up_down_token(BF16, m, k, gated, True))
            for m in (1, 8, 64, 65, 300, 2049, 100_000)
            for gated in (True,)
        }
        assert len(chosen) == 1
        ((gate, token),) = chosen
        assert gate == "gate_pack"
        assert token.cluster > 1


# What stands for a tensor without having its values in memory as they are. F.linear takes all of these.
STAND_INS: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda t: torch._neg_view(-t),
    "imaginary part": lambda t: torch.complex(t.float() * 0, -t.float()).conj().imag.to(t.dtype),
    "imaginary part itself": lambda t: torch.complex(t.float() * 0, -t.float()).conj().imag,
    "zeros": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "expanded": lambda t: t[..., :1].expand(t.shape),
    "expanded rows": lambda t: t[:1].expand(t.shape),
    "unaligned": lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape),
    "every second column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "column-major": lambda t: t.t().contiguous().t(),
    "copied on write": lambda t: torch._lazy_clone(t),  # type: ignore[attr-defined]
}
OPERANDS = ["x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"]


def operands(dtype: torch.dtype) -> dict[str, Tensor]:
    problem = real_problem(5, 264, 32, dtype, bias=True)
    return {**dict(zip(OPERANDS, problem)), "w_down": problem.w_down.t()}


@pytest.mark.parametrize("argument", OPERANDS)
@pytest.mark.parametrize("kind", STAND_INS)
def test_tensors_whose_memory_does_not_hold_their_values(kind: str, argument: str) -> None:
    torch.manual_seed(0)
    given = operands(torch.float32 if kind.endswith("itself") else BF16)
    odd = STAND_INS[kind](given[argument])
    for strategy, training in (("row", False), ("union", False), ("union", True), ("dense", False)):
        results = []
        for value in (odd, odd.clone().resolve_neg()):
            leaves = {name: t.clone().requires_grad_(training) for name, t in given.items() if name != argument}
            with torch.set_grad_enabled(training):
                y = twell.sparse_gated_ffn(**leaves, **{argument: value}, strategy=strategy)
                gradients = torch.autograd.grad(y.sum(), list(leaves.values())) if training else ()
            results.append([y, *gradients])
        for one, other in zip(*results):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    # kernels that are called without the dispatcher read memory
    plain = {**given, argument: odd}
    direct = admitted(Operands(*(plain[name] for name in OPERANDS)), True)
    assert direct == (kind not in ("negated", "imaginary part itself", "zeros"))
    if argument in ("x", "w_gate") and not kind.endswith("itself"):
        packed = [twell.pack(**{"x": given["x"], "w_gate": given["w_gate"], argument: v}) for v in (odd, odd + 0)]
        assert torch.equal(packed[0].unpack(), packed[1].unpack())


@pytest.mark.parametrize("kind", ["negated", "zeros"])
def test_incoming_gradients_may_be_stand_ins(kind: str) -> None:
    torch.manual_seed(0)
    given = {name: t.requires_grad_() for name, t in operands(BF16).items()}
    upstream = STAND_INS[kind](torch.randn(5, 32).to(BF16))
    assert not _modes.eager((upstream,))
    y = twell.sparse_gated_ffn(**given, strategy="union")
    results = [
        torch.autograd.grad(y, list(given.values()), g, retain_graph=True)
        for g in (upstream, upstream.clone().resolve_neg())
    ]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("strategy", ["union", "dense"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (STAND_INS["negated"], "whose memory does not hold its values"),
        (lambda t: torch.inference_mode()(t.clone)(), "made in inference mode"),
        (torch._to_functional_tensor, "that a transform wraps"),
        (lambda t: t.to_sparse(), "of layout torch.sparse_coo"),
    ],
)
def test_main_gradients_are_plain_memory(make: Callable[[Tensor], Tensor], said: str, strategy: str) -> None:
    given = {name: t.requires_grad_() for name, t in operands(BF16).items()}
    mains = [torch.zeros(264, 32), torch.zeros(264, 32), torch.zeros(32, 264)]
    for i in range(3):
        odd = [make(main) if i == j else main for j, main in enumerate(mains)]
        with pytest.raises(ValueError, match=f"main_grads must have for .*, got float32 .*{said}"):
            twell.sparse_gated_ffn(**given, strategy=strategy, main_grads=odd)


@pytest.mark.parametrize("bias", ["b_gate", "b_up", "b_down"])
def test_biases_made_in_inference_mode_train_as_with_dense(bias: str) -> None:
    given = {name: t.requires_grad_() for name, t in operands(BF16).items()}
    with torch.inference_mode():
        given[bias] = given[bias].clone()
    assert torch.autograd.grad(twell.sparse_gated_ffn(**given, strategy="union").sum(), [given["w_gate"]])[0].any()
