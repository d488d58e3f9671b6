"""Training on the GPU: exact bits, real numbers within budget, adversarial patterns, PyTorch's rules, memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from activations import EVERY, float64_hidden, form
from torch import Tensor, nn

from tests.gpu.operands import padded
from tests.gpu.strategies import BF16, BIASES, BOTH, FP16, VARIANTS, assert_nothing_waits, label
from twell import ops, testing
from twell._runtime import device, geometry
from twell.nn import SparseGatedMLP, SparseMLP
from twell.ops import hybrid
from twell.testing import FFN

DEVICE = "cuda"
# the coefficient of the sum of |h| in real problems; exact in bf16, so that dense PyTorch rounds nothing more
L1 = 0.25
Gradients = dict[str, Tensor]
# an activation and its threshold
RELU = ("relu", 0.0)


# Exact: small integers, whose every sum fp32 holds


def operands(problem: FFN, gated: bool) -> tuple[Any, ...]:
    """The tensors as the operators take them."""
    return tuple(problem if gated else problem._replace(w_up=None, b_up=None))


def upstream_of_l1(dl1: float) -> Tensor:
    return torch.tensor(dl1, dtype=torch.float32, device=DEVICE)


def check_forward(problem: FFN, gated: bool, compression: int, how: tuple[Any, float] = RELU) -> Tensor:
    """``hybrid_forward`` against float64, and the gate that it keeps against the CPU operator's; returns that gate."""
    arguments, options = operands(problem, gated), form(*how)
    y, l1, nonzeros, kept = testing.poisoned(lambda: ops.hybrid_forward(*arguments, compression, 0, *how))
    testing.assert_same(y, testing.exact_output(problem, gated=gated, rounded=True, **options), "y")
    gate = testing.float64_gate(problem, options["threshold"])
    assert int(nonzeros) == int((gate != 0).sum())
    total = float(float64_hidden(problem, *how, gated).abs().sum())
    assert float(l1) == pytest.approx(total, rel=0 if total < testing.EXACT_LIMIT else 2e-6, abs=0)
    m, n = gate.shape
    on_cpu = ops.hybrid_forward(*(None if t is None else t.cpu() for t in arguments), compression, 0, *how)
    testing.assert_hybrid_same(kept, on_cpu[3], m, n, gated)
    return kept  # type: ignore[no-any-return]


def check_backward(problem: FFN, gated: bool, dl1: float, kept: Tensor, how: tuple[Any, float] = RELU) -> None:
    """``hybrid_backward`` and ``hybrid_backward_accumulate`` against float64 with the same roundings."""
    dy = testing.integer_upstream(problem)
    right = testing.exact_gradients(problem, dy, dl1, gated=gated, **form(*how))
    dtype = problem.x.dtype
    names = ("x", "w_gate", "w_up", "w_down", "b_gate", "b_up")

    def assert_right(found: dict[str, Tensor]) -> None:
        for name, gradient in found.items():
            if name in right:
                testing.assert_same(gradient, right[name].float().to(dtype), f"gradient of {name}")
            else:
                assert gradient.shape == (0,), name

    arguments = (dy, upstream_of_l1(dl1), *operands(problem, gated)[:6], kept)
    found = testing.poisoned(lambda: ops.hybrid_backward(*arguments, True, True, *how))
    assert_right(dict(zip(names, found, strict=True)))
    mains = [torch.full(t.shape, 3.0, device=DEVICE) if gated or i != 1 else None for i, t in enumerate(problem[1:4])]
    dx, db_gate, db_up = ops.hybrid_backward_accumulate(*arguments, *mains, True, *how)
    assert_right({"x": dx, "b_gate": db_gate, "b_up": db_up})
    for name, main in zip(names[1:4], mains, strict=True):
        if main is not None:
            testing.assert_same(main, (right[name] + 3).float(), f"main gradient of {name}")


def check(
    problem: FFN,
    gated: bool = True,
    dl1: float = 0.0,
    compression: int = 8,
    overflows: bool | None = None,
    how: tuple[Any, float] = RELU,
) -> None:
    """All operators, then the function with autograd around them. ``overflows``: whether they must not fit."""
    kept = check_forward(problem, gated, compression, how)
    if overflows is not None:
        m, n = problem.x.shape[0], problem.w_gate.shape[0]
        assert (int(hybrid.sizes(kept, m)[-1]) > geometry.hybrid_capacity(m, n)) == overflows
    check_backward(problem, gated, dl1, kept, how)
    dy = testing.integer_upstream(problem)
    options = {"compression": compression, "strategy": "union", **form(*how)}
    found = testing.sparse_gradients(problem, dy, dl1, gated=gated, **options)
    right = testing.exact_gradients(problem, dy, dl1, gated=gated, **form(*how))
    assert found.keys() == right.keys()
    for name, gradient in found.items():
        testing.assert_same(gradient, right[name].float().to(gradient.dtype), f"autograd's gradient of {name}")


@EVERY
@pytest.mark.parametrize(
    ("m", "density", "dtype"), [(1, 0.1, FP16), (130, 0.05, BF16), (300, 0.05, FP16), (300, 0.5, BF16), (70, 1, FP16)]
)
def test_every_activation(name: Any, threshold: float, gated: bool, m: int, density: float, dtype: torch.dtype) -> None:
    problem = testing.integer_problem(
        m, 264, 264, density=density, biases=BIASES, device=DEVICE, dtype=dtype, activation=name
    )
    check(problem, gated, -2.0, overflows=density >= 0.5, how=(name, threshold))


@BOTH
@pytest.mark.parametrize("ctas", [2, 20, 100])
def test_any_number_of_ctas_computes_every_unit(gated: bool, ctas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of all lengths, in rounds or in a part of one, whole or cut."""
    for m, density in ((1000, 0.0005), (1000, 0.002), (700, 0.01), (3000, 0.004)):
        problem = testing.integer_problem(m, 72, 1032, density=density, biases=BIASES, device=DEVICE)
        with monkeypatch.context() as patched:
            patched.setattr(device, "sm_count", lambda index: ctas)
            check_backward(problem, gated, 1.0, check_forward(problem, gated, 8))


# One dimension at a time from its list of edges, then corners where several meet.
SHAPES = [
    *((m, 72, 264) for m in (1, 127, 128, 129, 1000)),
    *((m, 896, 5632) for m in (1, 129, 1000)),
    *((129, 64, n) for n in (8, 264, 5632, 8192)),
    *((129, k, 264) for k in (8, 72, 896, 2048, 4096, 16384)),
    (1, 2048, 8192),
    (127, 4096, 5632),
    (128, 8, 8),
    (300, 16384, 136),
    (1000, 2048, 5632),
    (1000, 8, 8192),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "compression", "biases", "gated", "dl1"),
    [
        # two different variants at each shape: one gated, one with biases
        (shape, *VARIANTS[(i + j) % 6], ("", BIASES)[(i + j) % 2], j == 0, (0.0, 1.0, -2.0)[(i + 2 * j) % 3])
        for i, shape in enumerate(SHAPES)
        for j in range(2)
    ],
    ids=label,
)
def test_shapes(
    shape: tuple[int, int, int], dtype: torch.dtype, compression: int, biases: str, gated: bool, dl1: float
) -> None:
    m, k, n = shape
    density = 0.008 if n > 1000 else 0.08
    problem = testing.integer_problem(m, k, n, density=density, biases=biases, device=DEVICE, dtype=dtype)
    # rows of seven weights have more positive sums than the format holds
    check(problem, gated, dl1, compression, overflows=None if k == 8 else False)


DRAWN = [
    # m, k, n, density, biases, dtype, and whether the format is too small
    *((130, 72, 264, 0.1, biases, BF16, False) for biases in ("gate", "up", "down")),
    *((130, 72, 264, 1, biases, BF16, True) for biases in ("gate", "up", "down")),
    *(
        (*shape, biases, dtype, True)
        for shape in [(1, 8, 264, 1), (129, 72, 264, 1), (70, 896, 5632, 0.2), (129, 4096, 264, 0.5)]
        for biases, dtype in ((BIASES, BF16), ("", FP16))
    ),
    (65, 16384, 136, 0.7, BIASES, BF16, True),
    # neurons whose 16 bits are all set, and more than 65,536 tokens
    (130, 64, 65536, 0.008, "", BF16, False),
    (70_000, 72, 264, 0.08, BIASES, BF16, False),
    # lists of tokens that are cut, at last in tiles of popular neurons and of rare ones
    (1024, 264, 200, 0.05, "", BF16, None),
    (1025, 264, 200, 0.05, "gate up", BF16, None),
    (6000, 136, 520, 0.05, "", BF16, None),
    (6000, 520, 136, 0.2, "gate", BF16, None),
    (20000, 2048, 264, 0.02, "", BF16, None),
    (9000, 72, 4000, 0.004, "up", BF16, None),
]


@BOTH
@pytest.mark.parametrize(("m", "k", "n", "density", "biases", "dtype", "overflows"), DRAWN)
def test_densities_biases_and_long_lists(
    m: int, k: int, n: int, density: float, biases: str, dtype: torch.dtype, overflows: bool | None, gated: bool
) -> None:
    problem = testing.integer_problem(m, k, n, density=density, biases=biases, device=DEVICE, dtype=dtype)
    check(problem, gated, 1.0, overflows=overflows)


@BOTH
def test_as_many_as_fit_and_one_more(gated: bool) -> None:
    """The last pattern that the format holds, and the first that it does not."""
    each = geometry.hybrid_capacity(300, 5632) // 300
    gates = gates_at(300, 5632, lambda generator: torch.full((300,), each))
    check(testing.pattern_problem(gates, 304, device=DEVICE), gated, 1.0, overflows=False)
    gates[7, gates[7].argmin()] = 1
    check(testing.pattern_problem(gates, 304, device=DEVICE), gated, 1.0, overflows=True)


def gates_at(m: int, n: int, counts: Callable[[torch.Generator], Tensor], seed: int = 0) -> Tensor:
    """Integers [m, n], in each row as many positive ones as ``counts`` says, at random places; 1 to 3."""
    generator = torch.Generator().manual_seed(seed)
    active = torch.rand(m, n, generator=generator).argsort(1).argsort(1) < counts(generator)[:, None]
    values = torch.randint(1, 4, (m, n), generator=generator)
    return torch.where(active, values, 1 - values)


def set_pattern(name: str, gates: Tensor) -> None:
    """Change random gates [300, 5632] in place."""
    if name not in ("one row all positive", "one neuron in every token", "a tile of silent tokens"):
        gates[:] = -1
    if name == "one row all positive":
        gates[200] = 1
    elif name == "one neuron in every token":
        gates[:, 5000] = 2
    elif name == "a tile of silent tokens":
        gates[128:256] = 0
    elif name == "just over the tile":
        # at compression 8 a tile of 256 neurons holds 31
        gates[:, 1000:1031], gates[:, 1023:1055] = 1, 2
    elif name == "few hot neurons":
        # 64 neurons hold nearly all non-zeros: one tile of weight gradients does all the work
        gates[:, ::88] = torch.arange(300)[:, None] % 3
    elif name == "last token and neuron":
        gates[-1, -1] = 3


PATTERNS = [
    "one row all positive",
    "one neuron in every token",
    "a tile of silent tokens",
    "all dead",
    "just over the tile",
    "few hot neurons",
    "last token and neuron",
]


@BOTH
@pytest.mark.parametrize("name", PATTERNS)
def test_exact_patterns(name: str, gated: bool) -> None:
    gates = gates_at(300, 5632, lambda generator: torch.randint(0, 60, (300,), generator=generator))
    set_pattern(name, gates)
    for dl1, dtype, biases in ((0.0, BF16, BIASES), (1.0, FP16, "")):
        problem = testing.pattern_problem(gates, 304, biases=biases, device=DEVICE, dtype=dtype)
        check(problem, gated, dl1, overflows=False)


@BOTH
def test_parts_that_are_asked_for(gated: bool) -> None:
    """The gradient of x alone, and those of the weights alone, have the bits of all."""
    problem = testing.integer_problem(130, 72, 264, density=0.1, biases=BIASES, device=DEVICE)
    *_, kept = ops.hybrid_forward(*operands(problem, gated), 8)
    arguments = (testing.integer_upstream(problem), upstream_of_l1(1.0), *operands(problem, gated)[:6], kept)
    every = ops.hybrid_backward(*arguments, True, True)
    for asked in ((True, False), (False, True), (False, False)):
        found = testing.poisoned(lambda asked=asked: ops.hybrid_backward(*arguments, *asked))
        for i, (ours, right) in enumerate(zip(found, every, strict=True)):
            if asked[0] if i == 0 else asked[1]:
                testing.assert_same(ours, right)
            else:
                assert ours.shape == (0,)


@BOTH
def test_no_tokens(gated: bool) -> None:
    problem = testing.integer_problem(8, 72, 264, biases=BIASES, device=DEVICE).rows(0, 0)
    for name, gradient in testing.sparse_gradients(problem, problem.x, 1.0, gated=gated).items():
        assert not bool(gradient.any()), name


@BOTH
@pytest.mark.parametrize(("left", "right"), [(8, 16), (3, 5)])
@pytest.mark.parametrize("density", [0.1, 1])
def test_strided_operands(left: int, right: int, density: float, gated: bool) -> None:
    """Rows that kernels read in place, and rows that they cannot; dy too, and as a row for all tokens."""
    problem = testing.integer_problem(130, 72, 264, density=density, biases=BIASES, device=DEVICE)
    dy = testing.integer_upstream(problem)
    strided = FFN(*(padded(t, left, right) for t in problem[:4]), *problem[4:])
    for upstream in (dy, dy[:1].expand(130, -1)):
        right_ones = testing.exact_gradients(problem, upstream, gated=gated)
        for given in (upstream, padded(upstream, left, right), upstream.t().contiguous().t()):
            for name, gradient in testing.sparse_gradients(strided, given, gated=gated).items():
                testing.assert_same(gradient, right_ones[name].float().to(BF16), name)


# Real numbers: as close to float64 as dense PyTorch is


def assert_close(problem: FFN, gated: bool, coefficients: tuple[float, ...] = (0.0, L1), **options: Any) -> None:
    """Every gradient within budget, with and without the gradient of the sum of |h|."""
    dy = testing.real_upstream(problem)
    for dl1 in coefficients:
        gradients = testing.sparse_gradients(problem, dy, dl1, gated=gated, **options)
        compared = testing.compare_gradients(problem, dy, gradients, dl1, gated=gated)
        wrong = [f"{name}: {comparison}" for name, comparison in compared.items() if not comparison.ok]
        assert not wrong, f"dl1 {dl1}: {'; '.join(wrong)}"


@BOTH
def test_error_budget(workload: str, gated: bool, real_layers: Path | None) -> None:
    """Every workload at 16,384 tokens; workloads that are not sparse run by the strategy meant for them."""
    problem = testing.off_kinks(testing.load(workload, real_layers=real_layers, device=DEVICE), gated=gated)
    assert_close(problem, gated, strategy="dense" if workload == "dense911" else "auto")


@BOTH
@pytest.mark.parametrize(
    ("name", "m", "k", "n", "dtype", "biased"),
    [
        ("topic29", 4096, 2048, 5632, FP16, False),
        # more non-zeros than the format holds, on the sparse path
        ("dense911", 600, 2048, 5632, BF16, False),
        ("dense911", 600, 2048, 5632, FP16, False),
        ("dense911", 1024, 2048, 5632, BF16, True),
        ("skew29", 1024, 2048, 5632, BF16, True),
        *(("topic29", 1024, k, n, BF16, False) for k, n in ((896, 4864), (4096, 11008), (8192, 2048))),
        ("topic29", 70_000, 512, 1536, BF16, False),
    ],
)
def test_error_budget_of_other_layers(
    name: str, m: int, k: int, n: int, dtype: torch.dtype, biased: bool, gated: bool
) -> None:
    problem = testing.make(name, m, k, n, device=DEVICE, dtype=dtype)
    if biased:
        generator = torch.Generator(DEVICE).manual_seed(5)
        biases = (0.25 * torch.randn(size, generator=generator, device=DEVICE).to(dtype) for size in (n, n, k))
        problem = problem._replace(**dict(zip(("b_gate", "b_up", "b_down"), biases, strict=True)))
    assert_close(testing.off_kinks(problem, gated=gated), gated)


@BOTH
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("density", [0.1, 1])
def test_deterministic_algorithms(density: float, gated: bool) -> None:
    """No operator warns or raises, and the bits are those without."""
    problem = layer(density)
    expected = exact(problem, gated)
    torch.use_deterministic_algorithms(True)
    try:
        assert_equal(sparse(problem, gated), expected)
    finally:
        torch.use_deterministic_algorithms(False)


# PyTorch's rules: exact problems, so that results have one right answer


def layer(density: float = 0.1, seed: int = 0) -> FFN:
    return testing.integer_problem(130, 264, 264, density=density, biases=BIASES, seed=seed, device=DEVICE)


def sparse(problem: FFN, gated: bool, dl1: float = 1.0) -> Gradients:
    return testing.sparse_gradients(problem, testing.integer_upstream(problem), dl1, gated=gated)


def exact(problem: FFN, gated: bool, dl1: float = 1.0) -> Gradients:
    right = testing.exact_gradients(problem, testing.integer_upstream(problem), dl1, gated=gated)
    return {name: t.float().to(problem.x.dtype) for name, t in right.items()}


def leaves(problem: FFN) -> FFN:
    return problem.map(lambda t: t.detach().clone().requires_grad_())


def loss_of(problem: FFN, gated: bool, dy: Tensor, dl1: float = 1.0, **options: Any) -> Tensor:
    """A loss with the gradient ``dy`` with respect to y and ``dl1`` to the sum of |h|."""
    y, aux = testing.sparse_layer(problem, gated=gated, **options)
    return (y.double() * dy).sum() + dl1 * len(dy) * aux.l1


def assert_equal(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        testing.assert_same(found[name], right, f"gradient of {name}")


def grads_of(problem: FFN, gated: bool) -> Gradients:
    return {name: t.grad for name, t in problem.present(gated).items() if t.grad is not None}


@BOTH
@pytest.mark.parametrize("n", [64, 136], ids=["fits", "overflows"])
@pytest.mark.parametrize("biases", ["", BIASES], ids=["no-bias", "bias"])
def test_opcheck(n: int, biases: str, gated: bool) -> None:
    """All 64 neurons fire, so all parts of the format are defined. What lies between them never is.

    With 136 the non-zeros do not fit, and most of what forward returns is undefined; the CPU operator's is zero there.
    """
    problem = testing.integer_problem(130, 72, n, density=1, biases=biases, device=DEVICE)
    arguments = operands(problem, gated)
    if n == 64:
        # the others compare all outputs of two runs
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(ops.hybrid_forward, (*arguments, 8), test_utils=tests)
    on_cpu = ops.hybrid_forward(*(None if t is None else t.cpu() for t in arguments), 8)
    saved = (testing.integer_upstream(problem), upstream_of_l1(1.0), *arguments[:6], on_cpu[3].to(DEVICE))
    mains = [None if t is None else torch.ones(t.shape, device=DEVICE) for t in arguments[1:4]]
    torch.library.opcheck(ops.hybrid_backward, (*saved, True, True))
    torch.library.opcheck(ops.hybrid_backward_accumulate, (*saved, *mains, True))


@BOTH
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str, gated: bool) -> None:
    """fullgraph, forward and backward, with neighbours to fuse, for two numbers of tokens and for overflow."""
    torch.compiler.reset()

    def step(problem: FFN, dy: Tensor) -> Tensor:
        doubled = problem._replace(x=problem.x * 2 - problem.x)
        return loss_of(doubled, gated, dy)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for problem in (layer(), layer().rows(0, 77), layer(1)):
        own = leaves(problem)
        compiled(own, testing.integer_upstream(problem)).backward()
        assert_equal(grads_of(own, gated), exact(problem, gated))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
def test_compiled_modules(cls: Any, mode: str | None) -> None:
    """The modules compiled, and compiled into CUDA graphs, give the bits of eager for new data in each step."""
    torch.compiler.reset()
    torch.manual_seed(0)
    mlp = cls(264, 776, bias=True, device=DEVICE, dtype=BF16)
    compiled = torch.compile(mlp, fullgraph=True, mode=mode)
    parameters = tuple(mlp.parameters())
    for _ in range(5):
        x = torch.randn(130, 264, device=DEVICE).to(BF16)
        dy = torch.randn(130, 264, device=DEVICE).to(BF16)
        torch.compiler.cudagraph_mark_step_begin()
        found = [g.clone() for g in torch.autograd.grad(compiled(x), parameters, dy)]
        expected = torch.autograd.grad(mlp(x), parameters, dy)
        for ours, right in zip(found, expected, strict=True):
            testing.assert_same(ours, right)


@BOTH
def test_cuda_graph_follows_its_inputs(gated: bool) -> None:
    """One graph of forward and backward: sparse data, none, so much that it overflows, and sparse data again."""
    static, dy = layer(), testing.integer_upstream(layer())
    graph, gradients = testing.captured(lambda: testing.sparse_gradients(static, dy, 1.0, gated=gated))
    for density, seed in ((0.1, 0), (0, 1), (1, 2), (0.02, 3), (0.1, 0)):
        new = layer(density, seed)
        for old, tensor in zip(static, new, strict=True):
            assert old is not None
            assert tensor is not None
            old.copy_(tensor)
        for gradient in gradients.values():
            gradient.fill_(math.nan)
        graph.replay()
        assert_equal(gradients, exact(new, gated))


def test_cuda_graph_of_whole_training_steps() -> None:
    """Forward, loss, backward and optimizer in one graph: five replays are five eager steps, bit by bit."""
    torch.manual_seed(0)
    mlp = SparseGatedMLP(264, 776, bias=True, device=DEVICE, dtype=BF16)
    eager = copy.deepcopy(mlp)
    start = [p.detach().clone() for p in mlp.parameters()]
    x, target = (torch.randn(130, 264, device=DEVICE).to(BF16) for _ in range(2))
    static = torch.empty_like(x)

    def stepper(module: nn.Module) -> Callable[[Tensor], Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(batch: Tensor) -> Tensor:
            optimizer.zero_grad()
            y, aux = module(batch, return_aux=True)
            loss = (y - target).float().square().mean() + 1e-3 * aux.l1
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    step = stepper(mlp)
    graph, loss = testing.captured(lambda: step(static.copy_(x)))
    with torch.no_grad():
        for parameter, value in zip(mlp.parameters(), start, strict=True):
            parameter.copy_(value)
    eager_step = stepper(eager)
    for _ in range(5):
        x.copy_(x.roll(1, 0))
        graph.replay()
        expected = eager_step(x)
        assert torch.equal(loss, expected)
    for ours, right in zip(mlp.parameters(), eager.parameters(), strict=True):
        testing.assert_same(ours, right)


@BOTH
def test_side_stream(gated: bool) -> None:
    """A step is on the current stream: it waits for its earlier writes, and the host does not wait."""
    problem = layer()
    dy = testing.integer_upstream(problem)
    late = problem.map(lambda t: torch.full_like(t, math.nan))
    late_dy = torch.full_like(dy, math.nan)
    testing.sparse_gradients(late, late_dy, 1.0, gated=gated)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # for 0.1 s a launch on another stream would read NaN
        for old, new in zip((*late, late_dy), (*problem, dy), strict=True):
            assert old is not None
            old.copy_(new)
        found = testing.sparse_gradients(late, late_dy, 1.0, gated=gated)
    assert not stream.query()
    stream.synchronize()
    assert_equal(found, exact(problem, gated))


@BOTH
def test_cut_lists_have_the_same_bits_each_time(gated: bool) -> None:
    """Whichever warp is the last to store the sums of a piece: all that differs from run to run is the order."""
    torch.manual_seed(0)
    weights = [torch.randn(256, 512, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    layer = [torch.randn(12000, 512, device=DEVICE, dtype=torch.bfloat16), *weights, None, None, None]
    layer[1] -= 0.06
    layer[0] += 0.5
    if not gated:
        layer[2] = None
    y, *_, kept = ops.hybrid_forward(*layer, 8)
    given = (torch.randn_like(y), upstream_of_l1(0.0), *layer[:6], kept)
    first = ops.hybrid_backward(*given, True, True)
    for _ in range(100):
        for a, b in zip(ops.hybrid_backward(*given, True, True), first):
            testing.assert_same(a, b, "a gradient")


@BOTH
@pytest.mark.parametrize("density", [0.1, 1])
def test_nothing_waits_for_the_gpu(density: float, gated: bool) -> None:
    """Once kernels are loaded, a step does not make the host wait."""
    problem = layer(density)
    dy = testing.integer_upstream(problem)
    mains = [torch.zeros(t.shape, device=DEVICE) for t in (problem.w_gate, problem.w_up)[: 1 + gated]]
    mains.append(torch.zeros(problem.w_down.shape, device=DEVICE).t())

    def steps() -> None:
        testing.sparse_gradients(problem, dy, 1.0, gated=gated)
        loss_of(leaves(problem), gated, dy, main_grads=mains).backward()

    assert_nothing_waits(steps)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@BOTH
def test_two_devices(gated: bool) -> None:
    """The tensors' device counts, in forward and in backward; the current one is left alone."""
    problem = layer()
    expected = exact(problem, gated)
    for current in (0, 1):
        with torch.cuda.device(current):
            for device in ("cuda:1", "cuda:0"):
                found = sparse(problem.to(device), gated)
                assert {t.device for t in found.values()} == {torch.device(device)}
                assert_equal({name: t.to(DEVICE) for name, t in found.items()}, expected)
                assert torch.cuda.current_device() == current


@BOTH
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("inside", [False, True], ids=["backward-after", "backward-inside"])
def test_autocast(dtype: torch.dtype, inside: bool, gated: bool) -> None:
    """fp32 leaves under autocast are computed in its dtype and get fp32 gradients."""
    narrow = layer().map(lambda t: t.to(dtype))
    dy = testing.integer_upstream(narrow)
    wide = leaves(narrow.map(Tensor.float))
    with torch.autocast(DEVICE, dtype):
        loss = loss_of(wide, gated, dy)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    found = grads_of(wide, gated)
    assert {t.dtype for t in found.values()} == {torch.float32}
    assert_equal(found, {name: t.float() for name, t in exact(narrow, gated).items()})


@BOTH
def test_backward_changes_no_saved_tensor(gated: bool) -> None:
    """They may wait on the CPU; the gradients of a second backward pass are those of the first, and add up."""
    own, dy, expected = leaves(layer()), testing.integer_upstream(layer()), exact(layer(), gated)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = loss_of(own, gated, dy)
    loss.backward(retain_graph=True)
    assert_equal(grads_of(own, gated), expected)
    loss.backward()
    assert_equal(grads_of(own, gated), {name: t + t for name, t in expected.items()})
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@BOTH
@pytest.mark.parametrize("layout", ["rows", "linear", "columns", "elements"])
@pytest.mark.parametrize("density", [0.1, 1])
def test_main_gradients(density: float, layout: str, gated: bool) -> None:
    """fp32 tensors take the weights' gradients, unrounded, whatever their layout; biases keep theirs.

    They may be columns of one buffer, whole blocks or every fourth one, and nothing beside them is written.
    """
    problem = layer(density)
    own, dy = leaves(problem), testing.integer_upstream(problem)
    right = testing.exact_gradients(problem, dy, 1.0, gated=gated)
    names = ("w_gate", "w_up", "w_down") if gated else ("w_gate", "w_down")
    (n, k), mains = problem.w_gate.shape, {}
    whole = torch.full((n, 4 * k), 2.0, device=DEVICE)
    for i, name in enumerate(names):
        mains[name] = {
            "rows": torch.full((n, k), 2.0, device=DEVICE),
            "linear": torch.full((k, n), 2.0, device=DEVICE).t(),
            "columns": whole[:, i * k : (i + 1) * k],
            "elements": whole[:, i::4],
        }[layout]
    given = [main.t() if name == "w_down" else main for name, main in mains.items()]
    for _ in range(2):
        loss_of(own, gated, dy, main_grads=given).backward()
    for name, main in mains.items():
        assert getattr(own, name).grad is None
        testing.assert_same(main, (2 * right[name] + 2).float(), name)
        main.fill_(2)
    assert bool((whole == 2).all())
    found = grads_of(own, gated)
    assert found.keys() == right.keys() - mains.keys()
    for name, gradient in found.items():
        testing.assert_same(gradient, 2 * right[name].float().to(BF16), name)


# Memory


@pytest.mark.parametrize("strategy", ["auto", "dense"])
def test_peak_memory(strategy: str) -> None:
    """Forward and backward of topic29 above inputs, dy among them: at most 500 MB; dense takes more."""
    problem = leaves(testing.make("topic29", device=DEVICE))
    dy = testing.real_upstream(problem)

    def peak() -> float:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        testing.sparse_gradients(problem, dy, strategy=strategy)
        return torch.cuda.max_memory_allocated() - before

    peak()
    torch.cuda.empty_cache()
    assert (peak() <= 500e6) == (strategy == "auto")
