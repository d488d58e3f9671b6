"""Pairs: two linear layers of a larger block, of which the first passes its input on and the second computes both."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ffns import BF16, Block, K, Literal, Pair, pickled, tokens, written
from torch import Tensor, nn
from torch.nn.utils import parametrize

import twell
from twell._runtime.log import warn_once
from twell._sparsify import layers, sparsify_

BLOCKS = {
    # the calls over several names, in a branch
    "spread": """
        if self.fc1.weight.dtype == x.dtype:
            up: Tensor = self.fc1(self.norm(x))
            h = self.activation_fn(up)
            x = x + self.fc2(h)
        return self.final(x)
    """,
    # more than x, so that it is read alone
    "masked": """
        def forward(self, x, mask):
            return x + mask * self.fc2(self.activation_fn(self.fc1(x)))
    """,
}


@pytest.mark.parametrize("code", BLOCKS)
def test_other_blocks_are_read(code: str) -> None:
    block, x = written(BLOCKS[code], Block, globals())(), tokens()
    inputs = (x, x.flip(0)) if code == "masked" else (x,)
    expected = block(*inputs)
    assert sparsify_(nn.Sequential(block)) == ["0.fc2"]
    torch.testing.assert_close(block(*inputs), expected)


def test_hooks_of_a_block_stay() -> None:
    block, calls = Block(), []
    block.register_forward_hook(lambda *_: calls.append(1))
    sparsify_(nn.Sequential(block))
    block(tokens())
    assert calls == [1]


def test_a_pair_whose_first_layer_is_changed_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    m = Block().eval()
    sparsify_(m)
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


def square(kind: Any = Pair) -> nn.Sequential:
    """A pair whose hidden state is as wide as x."""
    return nn.Sequential(kind(n=K))


def sparse_square(kind: Any = Pair) -> Any:
    m = square(kind)
    assert sparsify_(m) == ["0.fc2"]
    return m


class Adapted(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 4, False), nn.Linear(4, base.out_features, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Dropping(nn.Module):
    """A wrapper that loses part of its layer's input."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(F.dropout(x, 0.5))


CHANGES: dict[str, tuple[str, Callable[[Any], nn.Module]]] = {
    "fc1 adapted": ("fc1", Adapted),
    "fc1 replaced": ("fc1", lambda _: nn.Linear(K, K)),
    "fc1 followed": ("fc1", lambda base: nn.Sequential(base, nn.Linear(K, K))),
    "fc1 left out": ("fc1", lambda _: nn.Identity()),
    "fc2 adapted": ("fc2", Adapted),
    "fc2 replaced": ("fc2", lambda _: nn.Linear(K, K)),
    "fc2 preceded": ("fc2", lambda base: nn.Sequential(nn.Linear(K, K), base)),
    "fc2 of a part": ("fc2", Dropping),
    "of another pair": ("fc2", lambda _: sparse_square()[0].fc2),
    "act": ("act", lambda _: nn.GELU()),
}


@pytest.mark.parametrize(
    ("kind", "change"), [(kind, c) for kind in (Pair, Literal) for c in CHANGES if kind is Pair or c != "act"]
)
@pytest.mark.parametrize(
    "through",
    [lambda m: m, copy.deepcopy, pickled],
    ids=["itself", "deepcopy", "pickle"],
)
def test_a_square_pair_that_is_changed_later_raises(kind: Any, change: str, through: Callable[[Any], Any]) -> None:
    name, make = CHANGES[change]
    m = sparse_square(kind)
    m(torch.randn(3, K))
    m = through(m)
    m(torch.randn(3, K))
    setattr(m[0], name, make(getattr(m[0], name)))
    with pytest.raises(NotImplementedError, match=r"fc[12] of a twell pair must be .*got.*before sparsify_"):
        m(torch.randn(3, K))


def called_outside(block: Any, x: Tensor) -> Tensor:
    return block.fc2(F.relu(block.fc1(x)))  # type: ignore[no-any-return]


def test_code_outside_of_a_square_pair_raises() -> None:
    with pytest.raises(NotImplementedError, match="the very tensor that fc1 returns"):
        called_outside(sparse_square()[0], torch.randn(3, K))


LEGITIMATE: dict[str, Callable[[Any], object]] = {
    "checkpointed": lambda m: setattr(m[0], "fc2", wrapper(m[0].fc2)),
    "both checkpointed": lambda m: [setattr(m[0], name, wrapper(getattr(m[0], name))) for name in ("fc1", "fc2")],
    "followed": lambda m: setattr(m[0], "fc2", nn.Sequential(m[0].fc2, nn.Identity())),
    "compiled": lambda m: m.compile(backend="eager"),
    "fc1 compiled": lambda m: m[0].fc1.compile(backend="eager"),
    "fc1 wrapped": lambda m: setattr(m[0], "fc1", torch.compile(m[0].fc1, backend="eager")),
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


@pytest.mark.parametrize("change", LEGITIMATE)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_square_pair_allows_what_changes_nothing(change: str, autocast: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    dense = square()
    sparse = copy.deepcopy(dense)
    sparsify_(sparse)
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
    torch.testing.assert_close(next(iter(layers(sparse).values()))(x), dense(x))


def test_threads_share_a_square_pair() -> None:
    dense = square()
    sparse = copy.deepcopy(dense)
    sparsify_(sparse)
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
    m = nn.Sequential(Block().eval())
    sparsify_(m)
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


@pytest.mark.parametrize("name", ["fc1", "fc2"])
@pytest.mark.parametrize("form", [Pair, Literal, Block])
def test_a_parametrization_of_a_pair_runs_once_per_call(form: Callable[[], nn.Module], name: str) -> None:
    dense = nn.Sequential(form())
    sparse = copy.deepcopy(dense)
    sparsify_(sparse)
    runs = []
    for m in (dense, sparse):
        counted = Counted()
        parametrize.register_parametrization(m[0].get_submodule(name), "weight", counted)
        before = counted.runs
        m(torch.randn(3, K))
        runs.append(counted.runs - before)
    assert runs == [1, 1]
