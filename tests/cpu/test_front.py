"""Known calls of layers, on a fake GPU: which calls go to their launches at once, and what sends one the long way."""

import contextlib
import copy
import itertools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import twell
from tests.cpu import fake_gpu
from tests.cpu.fake_gpu import FakeGpu
from tests.habits.entries import ENTRIES
from tests.habits.refusals import sections, wrong
from twell import testing
from twell.call import functional
from twell.choose import cards, measurement, rates, site
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.nn.models import set_down_layout
from twell.ops import calls, dense
from twell.ops.ffn import direct
from twell.runtime import modes
from twell.testing.bits import assert_same

BF16 = torch.bfloat16
K, N = 64, 256
CLASSES = pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])


@pytest.fixture
def long(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """x of each call that took the long way."""
    calls: list[Tensor] = []
    run = functional.run

    def counted(function: Any, given: Any, *others: Any) -> Any:
        calls.append(given.x)
        return run(function, given, *others)

    monkeypatch.setattr(functional, "run", counted)
    return calls


@pytest.fixture
def chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" chooses on the fake GPU, and figures arrive at once."""
    monkeypatch.setattr(cards, "imposed", lambda kind, index: "")
    monkeypatch.setattr(functional, "imposed_on_call", lambda kind, index: "")
    monkeypatch.setattr(measurement, "Transfer", fake_gpu.Arrived)


def layer(cls: Any = SparseGatedMLP, strategy: Any = "union", bias: bool = False) -> Any:
    made = cls(K, N, bias, strategy=strategy, dtype=BF16).eval().requires_grad_(False)
    set_down_layout(made, "rows")
    return made


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, K).to(BF16)


@CLASSES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("strategy", ["union", "row"])
def test_the_second_call_of_a_shape_goes_to_its_launches(
    cls: Any, bias: bool, strategy: str, gpu: FakeGpu, long: list[Tensor]
) -> None:
    mlp = layer(cls, strategy, bias)
    for shape in ((5,), (2, 40), (1, 1), (200,)):
        long.clear()
        x = tokens(*shape)
        first = mlp(x)
        launched = list(gpu.launches)
        gpu.clear()
        # as an optimizer of flat parameters moves them
        for p in mlp.parameters():
            p.data = p.data.clone(memory_format=torch.preserve_format)
        again = mlp(x)
        assert len(long) == 1
        assert again.shape == first.shape == x.shape
        assert [spec for spec, _ in gpu.launches] == [spec for spec, _ in launched]
        # the operands themselves, and y
        given = {t.data_ptr() for t in (x, *mlp.parameters(), again)}
        read = {a.data_ptr() for _, arguments in gpu.launches for a in arguments if isinstance(a, Tensor) and a.numel()}
        assert given <= read
        gpu.clear()


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Odd(Tensor):
    pass


def within(context: Any, mlp: Any, x: Tensor) -> None:
    with context:
        mlp(x)


def behind(change: Callable[[Any], Any]) -> Callable[[Any, Tensor], Any]:
    return lambda mlp, x: (change(mlp), mlp(x))


def weight(values: Tensor) -> Callable[[Any, Tensor], Any]:
    return behind(lambda mlp: setattr(mlp.up_proj.weight, "data", values))


# what happens there is not of the test: on a fake GPU it may fail
WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "autocast": lambda mlp, x: within(torch.autocast("cpu", BF16), mlp, x),
    "a function mode": lambda mlp, x: within(_Functions(), mlp, x),
    "a dispatch mode": lambda mlp, x: within(_Dispatches(), mlp, x),
    "a profiler": lambda mlp, x: within(torch.profiler.profile(), mlp, x),
    "forward-mode AD": lambda mlp, x: within(torch.autograd.forward_ad.dual_level(), mlp, x),
    "a capture": lambda mlp, x: within(mock.patch.object(modes, "stream_captures", return_value=True), mlp, x),
    "another current device": lambda mlp, x: within(
        mock.patch.object(torch.cuda, "current_device", return_value=1), mlp, x
    ),
    "x that is negated": lambda mlp, x: mlp(torch._neg_view(-x)),
    "x of rows apart": lambda mlp, x: mlp(torch.zeros(5, 2 * K, dtype=BF16)[:, :K]),
    "x out of line": lambda mlp, x: mlp(torch.zeros(5 * K + 1, dtype=BF16)[1:].view(5, K)),
    "x of a class": lambda mlp, x: mlp(x.as_subclass(_Odd)),
    "x of another dtype": lambda mlp, x: mlp(x.half()),
    "strategy": behind(lambda mlp: setattr(mlp, "strategy", "row")),
    "invariant": behind(lambda mlp: twell.nn.set_strategy(mlp, "row", invariant=True)),
    "activation": behind(lambda mlp: setattr(mlp, "activation", "relu2")),
    "record_aux": behind(lambda mlp: setattr(mlp, "record_aux", True)),
    "a layout": behind(lambda mlp: set_down_layout(mlp, "linear")),
    "a weight of another layout": weight(torch.zeros(K, N, dtype=BF16).t()),
    "a weight out of line": weight(torch.zeros(N * K + 1, dtype=BF16)[1:].view(N, K)),
    "a bias": behind(lambda mlp: setattr(mlp.down_proj, "bias", nn.Parameter(torch.zeros(K, dtype=BF16), False))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")
def test_what_sends_a_call_the_long_way(way: str, long: list[Tensor]) -> None:
    mlp, x = layer(), tokens(5)
    mlp(x), mlp(x)
    assert len(long) == 1
    with contextlib.suppress(Exception):
        WAYS[way](mlp, x)
    assert len(long) == 2


def _replace(mlp: Any) -> None:
    mlp.up_proj = copy.deepcopy(mlp.up_proj)
    mlp.up_proj.forward = lambda x: x


HOOKS: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda mlp: mlp.gate_proj.register_forward_hook(lambda *_: None),
    "a replaced forward": _replace,
    "a weight of a subclass": lambda mlp: mlp.up_proj._parameters.update(
        weight=torch.zeros(N, K, dtype=BF16).as_subclass(_Odd)
    ),
    "a global hook": lambda mlp: nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", HOOKS)
@pytest.mark.filterwarnings("ignore")
def test_a_projection_that_is_more_than_a_product_is_called(change: str, gpu: FakeGpu, long: list[Tensor]) -> None:
    mlp, x = layer(), tokens(5)
    mlp(x), mlp(x)
    gpu.clear()
    handle = HOOKS[change](mlp)
    try:
        with contextlib.suppress(RuntimeError):
            mlp(x)
    finally:
        if change == "a global hook":
            handle.remove()
    # neither from memory nor by kernels
    assert not gpu.launches


@CLASSES
@pytest.mark.parametrize("bias", [False, True])
def test_a_step_goes_to_its_launches(cls: Any, bias: bool, gpu: FakeGpu, long: list[Tensor]) -> None:
    mlp = layer(cls, "union", bias).train().requires_grad_()
    x = tokens(3, 50).requires_grad_()
    steps = []
    for _ in range(3):
        gpu.clear()
        mlp(x).backward(torch.ones_like(x))
        steps.append(gpu.names())
        assert all(p.grad is not None and p.grad.stride() == p.stride() for p in (x, *mlp.parameters()))
    assert len(long) == 1
    assert steps[0] == steps[1] == steps[2]
    with torch.no_grad():
        mlp(x)
    assert len(long) == 2


@pytest.mark.usefixtures("chooses")
@pytest.mark.parametrize("training", [False, True])
def test_calls_between_those_that_measure_go_to_their_launches(
    training: bool, gpu: FakeGpu, long: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that measures, and the next, which decides by that, take the long way."""
    # other tests hold launches to signatures
    monkeypatch.setattr(fake_gpu, "CHECKS", False)
    monkeypatch.setattr(measurement, "Transfer", fake_gpu.Arrived)
    monkeypatch.setattr(rates, "HOST", {False: {}, True: {}})
    rates.waits_for_host.cache_clear()
    alone, x = layer(strategy="auto").requires_grad_(training), tokens(896)
    due, calls = {0, 1, 2, 4, 8, 16, 32, 64, 128}, []
    for i in range(140):
        before = len(long)
        alone(x)
        calls += [i] * (len(long) - before)
    assert due <= set(calls) <= due | {i + 1 for i in due}
    assert twell.explain(alone).rows[0].calls == 140


@pytest.mark.usefixtures("chooses")
@pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
@pytest.mark.parametrize("training", [False, True])
def test_a_dense_choice_is_torchs_own(
    cls: Any, training: bool, gpu: FakeGpu, long: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bits and its gradients, in few calls of the long way: powers of two, which measure, and the next ones."""
    monkeypatch.setattr(rates, "HOST", {t: {"dense": 1e6, "row": 2e6, "union": 2e6} for t in (False, True)})
    mlp, x = layer(cls, "auto", bias=True).requires_grad_(training), tokens(4, 40).requires_grad_(training)
    stock = copy.deepcopy(mlp)
    stock.strategy = "dense"
    for _ in range(200):
        assert torch.equal(mlp(x), stock(x))
    ours = [given for given in long if given is x]
    # both layers: those of "dense" take it once
    assert len(ours) <= 2 * 9 + 1
    assert twell.explain(mlp).rows[0].calls == 200
    if training:
        grads = [torch.autograd.grad(each(x).sum(), [x, *each.parameters()]) for each in (mlp, stock)]
        assert all(map(torch.equal, *grads))


@pytest.mark.usefixtures("chooses")
def test_a_screen_that_is_switched_off_ends_what_is_known(gpu: FakeGpu, long: list[Tensor]) -> None:
    mlp, x = layer(strategy="auto"), tokens(2048)
    for _ in range(12):
        mlp(x)
    before = len(long)
    mlp(x)
    assert len(long) == before
    mlp.screen = "off"
    mlp(x)
    assert len(long) == before + 1


def test_what_is_remembered_is_bounded(gpu: FakeGpu, long: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MOST", 64)
    mlp = layer()
    for m in range(1, 200):
        mlp(tokens(m))
        assert 0 < len(calls._named()) <= 64


def test_a_layer_of_one_projection_for_both_asks_it(gpu: FakeGpu) -> None:
    """The weights that such a layer reads are views; an adapter or a hook hangs on the projection."""
    with pytest.MonkeyPatch.context() as own:
        # conversion tries blocks, for which a CPU is a CPU
        own.setattr(Tensor, "is_cuda", False)
        call, seen = ENTRIES["sparsify_, fused"].call("auto"), []
    set_down_layout(call.run, "linear")
    with torch.no_grad():
        for _ in range(10):
            call()
        call.run.gate_up_proj.register_forward_hook(lambda *_: seen.append(1))
        call()
    assert seen


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("strategy", ["union", "row", "dense"])
def test_a_bias_that_moves_is_that_of_its_projection(
    swapped: bool, training: bool, strategy: str, gpu: FakeGpu, long: list[Tensor]
) -> None:
    mlp, x = layer(strategy=strategy), tokens(200).requires_grad_(training)
    mlp.gate_proj.bias = nn.Parameter(torch.ones(N, dtype=BF16), training)
    mlp.requires_grad_(training)
    mlp(x), mlp(x)
    assert len(long) == 1
    if swapped:
        mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
    else:
        mlp.up_proj.bias, mlp.gate_proj.bias = mlp.gate_proj.bias, None
    gpu.clear()
    mlp(x)
    assert len(long) == 2
    packs = [a for spec, a in gpu.launches if spec.op.startswith("gate_pack")]
    assert all(a[2].numel() == 0 for a in packs)
    assert len(packs) == (strategy != "dense")


@pytest.mark.parametrize("training", [False, True])
def test_a_threshold_that_moves_is_read_at_each_call(
    training: bool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a gate of any size is fused where one may be
    monkeypatch.setattr(dense, "pays", lambda *_: True)
    monkeypatch.setattr(rates, "HOST", {False: {}, True: {}})
    mlp, x = layer(strategy="dense").requires_grad_(training), tokens(200)
    mlp.activation = "fatrelu"
    mlp.threshold = threshold = torch.tensor(0.0)
    for value in (0.0, 0.5, 1.5, 100.0):
        threshold.fill_(value)
        mlp(x)
        y = mlp(x)
        # the fake kernel would leave it undone
        gate = mlp.gate_proj(x)
        expected = mlp.down_proj(torch.where(gate <= value, 0, gate) * mlp.up_proj(x))
        assert torch.equal(y, expected)
    threshold.fill_(-1.0)
    with pytest.raises(ValueError, match="threshold must be"):
        mlp(x)


MISFITS: dict[str, Callable[[Any], Any]] = {
    "an up projection of one row": lambda mlp: setattr(mlp.up_proj.weight, "data", torch.ones(1, K, dtype=BF16)),
    "a bias of one value": lambda mlp: setattr(mlp.gate_proj.bias, "data", torch.ones(1, dtype=BF16)),
    "a down projection of more rows": lambda mlp: setattr(
        mlp.down_proj.weight, "data", torch.ones(2 * K, N, dtype=BF16)
    ),
    "another dtype": lambda mlp: setattr(mlp.up_proj.weight, "data", torch.ones(N, K, dtype=torch.float16)),
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("strategy", ["union", "dense"])
def test_what_does_not_fit_is_refused_by_known_layers(
    misfit: str, strategy: str, gpu: FakeGpu, long: list[Tensor]
) -> None:
    known, fresh, x = (layer(strategy=strategy, bias=True) for _ in range(2)), None, tokens(5)
    known, fresh = known
    known(x), known(x)
    errors = []
    for mlp in (known, fresh):
        MISFITS[misfit](mlp)
        with pytest.raises((ValueError, TypeError)) as error:
            mlp(x)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_a_projection_set_beside_a_renamed_one_is_refused(gpu: FakeGpu) -> None:
    from twell.nn.converted import NamedMLP

    linears = [nn.Linear(K, N, False, dtype=BF16), nn.Linear(N, K, False, dtype=BF16)]
    mlp, x = NamedMLP(("wi", "wo"), linears, strategy="union").eval().requires_grad_(False), tokens(5)
    set_down_layout(mlp, "rows")
    mlp(x), mlp(x)
    mlp.up_proj = nn.Linear(K, N, False, dtype=BF16)
    with pytest.raises(AttributeError, match="up_proj must be set by the child's own name"):
        mlp(x)


def test_x_of_one_row_reaches_kernels_with_plain_strides(gpu: FakeGpu) -> None:
    """Strides of one row may be anything, which kernels do not take."""
    mlp = layer().train().requires_grad_()
    for x in (tokens(1), torch.randn(K, 1).to(BF16).t(), torch.randn(1, 2 * K).to(BF16)[:, :K]):
        for _ in range(2):
            gpu.clear()
            dy = torch.randn(K, 1).to(BF16).t()
            mlp(x.detach().requires_grad_()).backward(dy)
            read = [
                a for _, arguments in gpu.launches for a in arguments if isinstance(a, Tensor) and a.shape == (1, K)
            ]
            assert read
            assert all(a.stride() == (K, 1) for a in read)


def test_a_checkpoint_and_its_recomputation_take_the_long_way(gpu: FakeGpu, long: list[Tensor]) -> None:
    mlp, x = layer().requires_grad_(), tokens(5).requires_grad_()
    mlp(x), mlp(x)
    assert len(long) == 1
    y = torch.utils.checkpoint.checkpoint(mlp, x, use_reentrant=False)
    assert len(long) == 2
    y.sum().backward()
    assert len(long) == 3


# Functions

OF_LAYERS = [section for section in sections() if section.startswith(("sparse_gated_ffn", "sparse_ffn", "ops.ffn"))]


def operands(gated: bool, bias: bool) -> dict[str, Any]:
    names = ("gate", "up", "down") if gated else ("up", "down")
    sizes = {"gate": (N, K), "up": (N, K), "down": (K, N)}
    found: dict[str, Any] = {f"w_{name}": torch.randn(sizes[name]).to(BF16) for name in names}
    found["w_down"] = found["w_down"].t().contiguous().t()
    return found | ({f"b_{name}": torch.randn(sizes[name][0]).to(BF16) for name in names} if bias else {})


@pytest.mark.parametrize("strategy", ["row", "union", "dense", "auto", "site"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.usefixtures("chooses")
def test_functions_know_their_calls(gated: bool, bias: bool, strategy: str, gpu: FakeGpu, long: list[Tensor]) -> None:
    function: Any = twell.sparse_gated_ffn if gated else twell.sparse_ffn
    how: Any = twell.AutoStrategy() if strategy == "site" else strategy
    given, x, seen = operands(gated, bias), tokens(200), []
    for training in (False, True):
        long.clear()
        for _ in range(8):
            gpu.clear()
            # one memory for all layers of a form
            given = {name: t.detach().clone(memory_format=torch.preserve_format) for name, t in given.items()}
            given["w_down"].requires_grad_(training)
            y = function(x, **given, strategy=how)
            assert y.requires_grad == training
            seen.append([spec for spec, _ in gpu.launches])
        # calls 0, 1, 2 and 4 of a site measure, and each may change what those behind it run
        assert len(long) == 1 if strategy != "site" else 4 < len(long) < 7
        assert seen[-1] == seen[-2]


@pytest.mark.parametrize("strategy", ["row", "union", "site"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.usefixtures("chooses")
def test_calls_of_e4m3_weights_are_known(gated: bool, strategy: str, gpu: FakeGpu, long: list[Tensor]) -> None:
    function: Any = twell.sparse_gated_ffn if gated else twell.sparse_ffn
    given = {name: twell.quantize(w) for name, w in operands(gated, False).items()}
    down = given["w_down"]
    given["w_down"] = down._replace(values=down.values.t().contiguous().t())
    how: Any = twell.AutoStrategy() if strategy == "site" else strategy
    for x in (tokens(5), tokens(2, 100), twell.quantize(tokens(5))):
        long.clear()
        for _ in range(8):
            gpu.clear()
            y = function(x, **given, strategy=how)
        assert (y.shape, y.dtype) == (x.shape, BF16)
        assert len(long) == 1 if strategy != "site" else 0 < len(long) < 7
    # whatever changes what runs, or is refused
    calls = len(long)
    slow = function(x, **given, strategy=how, fast_accum=False)
    assert len(long) == calls + 1
    assert slow.shape == x.shape
    calls = len(long)
    scaled = given | {"w_down": twell.quantize(down.dequantize(BF16), "tensor")}
    function(x, **scaled, strategy=how), function(x, **scaled, strategy=how)
    assert len(long) > calls
    with pytest.raises(NotImplementedError, match="requires grad"):
        function(x, **given, strategy=how, b_down=torch.zeros(K, dtype=BF16, requires_grad=True))


@pytest.mark.parametrize("section", OF_LAYERS)
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused_is_refused_of_known_kinds(section: str, gpu: FakeGpu) -> None:
    with fake_gpu.dispatched():
        assert wrong(section, values=False) == []


def test_what_asks_for_more_than_y_takes_the_long_way(gpu: FakeGpu, long: list[Tensor]) -> None:
    given, x = operands(False, False), tokens(128)
    twell.sparse_ffn(x, **given, strategy="union"), twell.sparse_ffn(x, **given, strategy="union")
    assert len(long) == 1
    mains = [torch.zeros(t.shape) for t in given.values()]
    more: list[dict[str, Any]] = [
        {"return_aux": True},
        {"main_grads": mains},
        {"counts": torch.zeros(N, dtype=torch.int64)},
        {"activation": "topk", "k": 3},
        {"activation": "batchtopk", "k": 3},
    ]
    for options in more:
        twell.sparse_ffn(x, **given, strategy="union", **options)
    assert len(long) == 1 + len(more)
    with torch.autocast("cpu", BF16):
        assert twell.sparse_ffn(x, **given, strategy="union").shape == x.shape
    assert len(long) == 2 + len(more)


@pytest.mark.usefixtures("chooses")
@pytest.mark.parametrize("chosen", ["union", "union+screen"])
def test_more_of_the_largest_have_room_whatever_a_site_measured(
    chosen: str, gpu: FakeGpu, long: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "decide", lambda *_: rates.Decision(chosen, "a test", {}))
    monkeypatch.setattr(rates, "held", lambda *_: 8)
    given, x, how = operands(False, False), tokens(200).requires_grad_(), twell.AutoStrategy()
    for k in (4, 4, 4, 4, 16, 16, 16):
        twell.sparse_ffn(x, **given, strategy=how, activation="topk", k=k)
    (bucket,) = how._buckets.values()
    assert bucket.held == 8


@pytest.mark.parametrize("strategy", ["row", "dense"])
@pytest.mark.filterwarnings("ignore")
def test_traces_and_fake_tensors_find_the_operator_of_e4m3_weights(strategy: str, gpu: FakeGpu) -> None:
    """What the kernels write is in no trace, and fake tensors have no memory."""
    given, x = {name: twell.quantize(w) for name, w in operands(True, False).items()}, tokens(5)

    def compute(x: Tensor) -> Tensor:
        return twell.sparse_gated_ffn(x, **given, strategy=strategy)  # type: ignore[arg-type]

    compute(x), compute(x)
    with fake_gpu.dispatched():
        traced = torch.jit.trace(compute, (x,), check_trace=False)
    assert "twell::ffn" in str(traced.graph)
    gpu.clear()
    mode = FakeTensorMode()
    fakes = {name: twell.Float8(*map(mode.from_tensor, record)) for name, record in given.items()}
    y = twell.sparse_gated_ffn(mode.from_tensor(x), **fakes, strategy=strategy)  # type: ignore[arg-type]
    assert isinstance(y, FakeTensor)
    assert not gpu.launches


@pytest.mark.usefixtures("chooses")
@pytest.mark.parametrize("float8", [False, True])
def test_graphs_find_the_site_of_calls_that_measure_nothing(float8: bool, gpu: FakeGpu) -> None:
    given: dict[str, Any] = operands(True, False)
    if float8:
        given = {name: twell.quantize(w) for name, w in given.items()}
    how, weight = twell.AutoStrategy(), given["w_gate"].values if float8 else given["w_gate"]
    # the host takes longer than one token, whatever the figures are
    twell.sparse_gated_ffn(tokens(1), **given, strategy=how)
    assert site.found(weight) is how


# The operator


OPERATOR: Any = sys.modules["twell.ops.ffn"]


@pytest.fixture
def asked(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """x of each call of the operator whose kind was not known."""
    calls: list[Tensor] = []
    check = OPERATOR.check_operands
    monkeypatch.setattr(OPERATOR, "check_operands", lambda layer: calls.append(layer.x) or check(layer))
    return calls


def of_operator(m: int = 40, gated: bool = True, biases: str = "") -> list[Tensor | None]:
    """Those of the operator; ``biases`` has a letter for each of g(ate), u(p) and d(own) that there is."""
    x, w_gate, w_up, w_down, *given = testing.integer_problem(m, K, N, density=0.1, biases="gate up down")
    kept = [bias if letter in biases else None for letter, bias in zip("gud", given)]
    return [x, w_gate, w_up if gated else None, w_down, *kept]


def call(given: list[Tensor | None], strategy: str = "row", weight: Tensor | None = None, **options: Any) -> Tensor:
    named = {"activation": "relu", "threshold": 0.0, "screen": False, "invariant": False, **options}
    return direct(*given, 8, strategy, weight, *named.values(), *[None] * 5, True)  # type: ignore[no-any-return]


def test_kinds_differ_by_whatever_changes_what_runs(gpu: FakeGpu, asked: list[Tensor]) -> None:
    ways: list[tuple[Any, ...]] = [("row", {}), ("union", {}), ("row", {"invariant": True}), ("dense", {})]
    ways += [("row", {"activation": "relu2"}), ("row", {"activation": "fatrelu", "threshold": 0.5})]
    forms = [of_operator(biases=biases) for biases in ("", "g", "u", "d", "gd", "ud")] + [of_operator(m=8)]
    for given, (strategy, options) in itertools.product(forms, ways):
        call(given, strategy, **options)
    assert len(asked) == len(forms) * len(ways)
    # rows that lie apart
    call([forms[0][0], torch.zeros(N, K + 8, dtype=BF16)[:, :K], *forms[0][2:]])
    assert len(asked) == len(forms) * len(ways) + 1


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("activation", ["relu", "relu2", "drelu"])
def test_a_dense_call_has_the_bits_of_the_first(
    merged: bool, activation: str, gpu: FakeGpu, asked: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w_gate, w_up, *others = of_operator(biases="" if merged else "gud")
    if merged:
        w_gate, w_up = torch.cat((w_gate, w_up)).chunk(2)  # type: ignore[arg-type]
    first, second = (call([x, w_gate, w_up, *others], "dense", activation=activation) for _ in range(2))
    assert len(asked) == 1
    assert torch.equal(first, second)
    # weights that are apart are not read as one, and the other way round, whichever came first
    products: list[int] = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: products.append(len(w)) or linear(x, w, b))
    apart = [x, w_gate, w_up.clone(), *others]  # type: ignore[union-attr]
    for given, one in ((apart, False), ([x, w_gate, w_up, *others], merged), (apart, False)):
        products.clear()
        assert_same(call(given, "dense", activation=activation), first)
        assert products[:-1] == ([2 * N] if one else [N, N])
