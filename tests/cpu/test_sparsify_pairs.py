"""Pairs: two linear layers of a larger block, of which the first passes its input on and the second computes both."""

import copy
import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ffns import BF16, Adapter, Block, K, N, Split, Wi, Wrapped, pickled, take, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrize

import twell
from twell import recipe
from twell._runtime.log import warn_once
from twell._sparsify import layers


class Residual(nn.Module):
    """A block with dropouts of nothing between its layers, by modules or, as transformers has them, by attributes."""

    def __init__(self, n: int = N) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2, self.norm = nn.Linear(K, n), nn.ReLU(), nn.Linear(n, K), nn.LayerNorm(K)
        self.drop, self.p = nn.Dropout(0.0), 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc1(self.norm(x)))
        h = F.dropout(h, p=self.p, training=self.training)
        return x + self.fc2(h)


class Dropped(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.drop(self.act(self.fc1(self.norm(x)))))


def test_a_pair_whose_first_layer_is_changed_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    m = take(Block().eval())
    x = torch.randn(3, K)
    y = m(x)
    warn_once.cache_clear()
    m.fc1.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.WARNING, "twell"):
        assert torch.equal(m(x), y)
    assert "fc1 of a twell pair has hooks" in caplog.text
    m.fc1.forward = lambda x: 2 * x  # type: ignore[method-assign]
    with pytest.raises(NotImplementedError, match="fc1 of a twell pair must keep its forward"):
        m(x)


def square() -> nn.Sequential:
    return nn.Sequential(Residual(n=K))


def sparse_square() -> Any:
    m = square()
    assert list(layers(take(m))) == ["0.fc2"]
    return m


class Dropping(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5))


class Bypassing(Wrapped):
    """A wrapper that reads its layer's parameters and does not call it, as some adapters do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base_layer.weight, self.base_layer.bias)


CHANGES: dict[str, tuple[str, Callable[[Any], nn.Module]]] = {
    "fc1 adapted": ("fc1", Adapter),
    "fc1 replaced": ("fc1", lambda _: nn.Linear(K, K)),
    "fc1 left out": ("fc1", lambda _: nn.Identity()),
    "fc1 wrapped": ("fc1", Wrapped),
    "fc1 bypassed": ("fc1", Bypassing),
    "fc2 adapted": ("fc2", Adapter),
    "fc2 of any width": ("fc2", lambda _: nn.AdaptiveAvgPool1d(K)),
    "fc2 of a part": ("fc2", Dropping),
    "of another pair": ("fc2", lambda _: sparse_square()[0].fc2),
    "act": ("act", lambda _: nn.GELU()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_square_pair_that_is_changed_later_raises(change: str) -> None:
    name, make = CHANGES[change]
    m = sparse_square()
    m(torch.randn(3, K))
    m = {"fc1 adapted": copy.deepcopy, "fc2 adapted": pickled}.get(change, lambda m: m)(m)
    m(torch.randn(3, K))
    setattr(m[0], name, make(getattr(m[0], name)))
    with pytest.raises(NotImplementedError, match=r"fc[12] of a twell pair must be .*got.*before sparsify_"):
        m(torch.randn(3, K))


FOREIGN: dict[str, Callable[[Any, Any], object]] = {
    "fc2 of another": lambda a, b: setattr(a, "fc2", b.fc2),
    "a copy": lambda a, b: setattr(a, "fc2", copy.deepcopy(b.fc2)),
    "swapped": lambda a, b: (first := a.fc2, setattr(a, "fc2", b.fc2), setattr(b, "fc2", first)),
    "fc1 of another": lambda a, b: setattr(a, "fc1", b.fc1),
}


@pytest.mark.parametrize(
    ("change", "compiled", "order"), [(name, i % 2 == 0, (1, -1)[i // 2]) for i, name in enumerate(FOREIGN)]
)
def test_a_layer_of_another_pair_raises(change: str, compiled: bool, order: int) -> None:
    torch._dynamo.reset()
    m = take(nn.Sequential(Residual(), Residual()))
    run = torch.compile(m, backend="eager") if compiled else m
    run(tokens())
    FOREIGN[change](*list(m)[::order])
    with pytest.raises(NotImplementedError, match="of a twell pair must be"):
        run(tokens())


@pytest.mark.parametrize(("make", "compiled"), [(Residual, True), (lambda: encoder(), False)])
def test_a_pair_with_both_layers_bypassed_raises(make: Callable[[], Any], compiled: bool) -> None:
    """Nothing else would notice that the activation is gone."""
    m = take(nn.Sequential(make().eval()))
    m(torch.randn(2, 3, K))
    for parent in list(m.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and "twell" in type(child).__module__:
                setattr(parent, name, Bypassing(child))
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError, match="must be the DeferredUp that sparsify_ made"):
        (torch.compile(m, backend="eager") if compiled else m)(torch.randn(2, 3, K))


def test_tied_pairs_are_one() -> None:
    m = nn.Sequential(Residual(), Residual())
    dense = copy.deepcopy(m)
    take(m)
    for model in (m, dense):
        model[1].fc1, model[1].fc2 = model[0].fc1, model[0].fc2
    torch.testing.assert_close(m(tokens()), dense(tokens()))
    torch.testing.assert_close(torch.compile(m, backend="eager")(tokens()), dense(tokens()))


def test_code_outside_of_a_square_pair_raises() -> None:
    block = sparse_square()[0]
    with pytest.raises(NotImplementedError, match="the very tensor that fc1 returns"):
        block.fc2(F.relu(block.fc1(torch.randn(3, K))))
    with pytest.raises(NotImplementedError, match="changed in place in between"):
        block.fc2(block.fc1(torch.randn(3, K)).add_(1))
    with torch.inference_mode():
        block.fc2(block.fc1(torch.randn(3, K)))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(K, 4, N, dropout=0.0, batch_first=True)


LATER: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "act": (Residual, lambda m: setattr(m, "act", nn.GELU())),
    "split": (Split, lambda m: setattr(m.intermediate, "intermediate_act_fn", nn.GELU())),
    **{
        name: (lambda: Residual(n=K), lambda m, child=child, make=make: setattr(m, child, make(getattr(m, child))))
        for name, (child, make) in CHANGES.items()
    },
}


@pytest.mark.parametrize(
    ("change", "fullgraph", "before"), [(change, i % 2 == 0, i % 3 == 0) for i, change in enumerate(LATER)]
)
def test_compiled_code_raises_after_a_change(change: str, fullgraph: bool, before: bool) -> None:
    torch._dynamo.reset()
    make, do = LATER[change]
    m = take(nn.Sequential(make()).train())
    compiled = torch.compile(m, backend="eager", fullgraph=fullgraph)
    if before:
        compiled(tokens())
    do(m[0])
    kind: Any = torch._dynamo.exc.Unsupported if fullgraph else NotImplementedError
    with pytest.raises(kind, match=r"of a twell pair must|NotImplementedError"):
        compiled(tokens())


DROPPING: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "p": (Residual, lambda m: setattr(m, "p", 0.5)),
    "dropout": (Dropped, lambda m: setattr(m.drop, "p", 0.5)),
    "dropout of torch's": (encoder, lambda m: setattr(m.dropout, "p", 0.5)),
    "layer": (Wi, lambda m: setattr(m.dropout, "p", 0.5)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("make", "do"), DROPPING.values(), ids=DROPPING)
@pytest.mark.parametrize("before", [False, True])
def test_training_that_drops_hidden_values_runs_as_it_did(make: Any, do: Any, before: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    sparse = nn.Sequential(make())
    if before:
        do(sparse[0])
    dense = copy.deepcopy(sparse)
    take(sparse, strategy="union")
    run = torch.compile(sparse, backend="eager") if compiled else sparse
    for change in (False, True):
        if change and not before:
            for m in (sparse, dense):
                do(m[0])
        for training in (True, False):
            results = []
            for m, call in ((sparse, run), (dense, dense)):
                m.train(training)
                torch.manual_seed(1)
                y = call(tokens())
                results.append([y, *torch.autograd.grad(y.square().sum(), list(m.parameters()))])
            torch.testing.assert_close(*results)


def test_what_needs_the_whole_hidden_state_is_refused_while_it_is_dropped() -> None:
    for make, do in (DROPPING["p"], DROPPING["layer"]):
        m = nn.Sequential(make())
        take(m)
        do(m[0])
        (layer,) = layers(m).values()
        rows = [(row.kind, row.strategy, "drops values" in row.reason) for row in twell.explain(m)]
        assert rows == [("inference", "dense", False), ("training", "dense", True)]
        layer.accumulate_main_grad = True
        with pytest.raises(NotImplementedError, match="set it to 0"):
            m(tokens())
        layer.accumulate_main_grad = False
        quantised = twell.quantize_(copy.deepcopy(m).bfloat16().eval())
        with torch.no_grad():
            quantised(tokens(BF16))
            with pytest.raises(NotImplementedError, match=r"got training mode with \w+, p = 0\.5: call eval"):
                quantised.train()(tokens(BF16))
    layer.record_aux = True
    m(tokens())
    assert layer.aux.l0 > N / 4
    pair = take(nn.Sequential(Residual()))
    pair[0].p = 0.5
    for watch in (twell.count_firing(pair), recipe.SparsityTracker(pair).watch(0)):
        with pytest.raises(NotImplementedError, match=r"a block that drops values .* \(p, p = 0\.5\)"), watch:
            pair(tokens())


HARMLESS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "wrapped": (Residual, lambda m: setattr(m, "fc2", nn.Sequential(m.fc2))),
    "dropout in evaluation": (Dropped, lambda m: (m.eval(), setattr(m.drop, "p", 0.5))),
    "p in evaluation": (Residual, lambda m: (m.eval(), setattr(m, "p", 0.5))),
    "checkpointed": (Split, lambda m: setattr(m, "intermediate", wrapper(m.intermediate))),
}


@pytest.mark.parametrize("change", HARMLESS)
def test_compiled_code_allows_what_changes_nothing(change: str) -> None:
    torch._dynamo.reset()
    make, do = HARMLESS[change]
    m = nn.Sequential(make()).eval()
    dense = copy.deepcopy(m)
    take(m, activation="relu")
    for model in (m, dense):
        do(model[0])
    torch.testing.assert_close(torch.compile(m, backend="eager")(tokens()), dense(tokens()))


LEGITIMATE: dict[str, Callable[[Any], object]] = {
    "checkpointed": lambda m: [setattr(m[0], name, wrapper(getattr(m[0], name))) for name in ("fc1", "fc2")],
    "followed": lambda m: setattr(m[0], "fc2", nn.Sequential(m[0].fc2, nn.Identity())),
    "compiled": lambda m: m.compile(backend="eager"),
    "fc1 compiled": lambda m: m[0].fc1.compile(backend="eager"),
    "fc2 compiled": lambda m: setattr(m[0], "fc2", torch.compile(m[0].fc2, backend="eager")),
    "fc2 not compiled": lambda m: [
        setattr(m[0].fc2, "forward", torch.compiler.disable(m[0].fc2.forward)),
        m.compile(backend="eager"),
    ],
    "hooks": lambda m: [c.register_full_backward_hook(lambda *_: None) for c in (m[0].fc1, m[0].act, m[0].fc2)],
    "dropout of nothing": lambda m: setattr(m[0], "act", nn.Dropout(0.0)),
}


def wrapper(module: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module)  # type: ignore[no-untyped-call,no-any-return]


@pytest.mark.parametrize(("change", "autocast"), zip(LEGITIMATE, itertools.cycle((False, True))))
def test_a_square_pair_allows_what_changes_nothing(change: str, autocast: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    dense = square()
    sparse = take(copy.deepcopy(dense))
    x = torch.randn(3, K, requires_grad=True)
    with torch.autocast("cpu", BF16, enabled=autocast):
        expected = dense(x)
        # a tensor that is alive when the next comes
        first = torch.randn(3, K)
        sparse(first)
        LEGITIMATE[change](sparse)
        for _ in range(2):
            y = sparse(x)
            torch.testing.assert_close(y, expected)
    wanted, got = (torch.autograd.grad(out.float().square().sum(), x)[0] for out in (expected, y))
    torch.testing.assert_close(got, wanted, rtol=2e-2 if autocast else 1e-5, atol=2e-2 if autocast else 1e-5)
    # the layer alone, as code that inspects a model calls it
    inner: Any = dense[0]
    if change == "fc2 compiled":
        # its graph has not taken what fc1 noted
        return
    torch.testing.assert_close(next(iter(layers(sparse).values()))(x), inner.fc2(inner.fc1(x).relu()))


def test_threads_share_a_square_pair() -> None:
    dense = square()
    sparse = take(copy.deepcopy(dense))
    xs = [torch.randn(3, K) for _ in range(4)]
    apart = threading.Barrier(len(xs))
    # all threads are between the layers at once
    sparse[0].act = Waiting(apart)

    def work(x: Tensor) -> None:
        expected = dense(x)
        for _ in range(3):
            with torch.no_grad():
                torch.testing.assert_close(sparse(x), expected)

    with ThreadPoolExecutor(len(xs)) as threads:
        list(threads.map(work, xs))


class Waiting(nn.Identity):
    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait(60)
        return x


def test_a_block_is_freed_with_its_pair() -> None:
    m = sparse_square()
    block = weakref.ref(m[0])
    gc.disable()
    try:
        del m
        assert block() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "register", ["register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"]
)
def test_hooks_on_the_second_layer_of_a_pair_warn(register: str, caplog: pytest.LogCaptureFixture) -> None:
    m = take(nn.Sequential(Block().eval()))
    x = torch.randn(3, K)
    y = m(x)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "twell"):
        with twell.count_firing(m):
            m(x)
        # twell's own hooks are fine
        assert "fc2 of a twell pair" not in caplog.text
        getattr(m[0].fc2, register)(lambda *_: None)
        assert torch.equal(m(x), y)
    assert "fc2 of a twell pair has hooks: they see the input of fc1" in caplog.text


class Counted(nn.Module):
    """A parametrization that changes with use, like spectral norm in training."""

    runs = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.runs += 1
        return weight


@pytest.mark.parametrize(("form", "name"), [(Residual, "fc1"), (Block, "fc2")])
def test_a_parametrization_of_a_pair_runs_once_per_call(form: Callable[[], nn.Module], name: str) -> None:
    dense = nn.Sequential(form())
    sparse = take(copy.deepcopy(dense))
    runs = []
    for m in (dense, sparse):
        counted = Counted()
        parametrize.register_parametrization(m[0].get_submodule(name), "weight", counted)
        before = counted.runs
        m(torch.randn(3, K))
        runs.append(counted.runs - before)
    assert runs == [1, 1]
