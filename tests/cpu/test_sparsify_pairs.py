"""Pairs: two linear layers of a larger block, of which the second computes both where nothing else needs the first."""

import copy
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ffns import BF16, Adapter, Block, K, N, Split, Wi, Wrapped, pickled, take, tokens
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn.utils import parametrize, spectral_norm
from torch.utils.checkpoint import checkpoint

import twell
from twell import recipe
from twell.integrations.sparsify import layers
from twell.runtime.log import warn_once


class Residual(nn.Module):
    """A block with dropouts of nothing between its layers, by modules or, as transformers has them, by attributes.

    Both layers are square: code between them that takes one tensor for another fails by no shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2, self.norm = nn.Linear(K, K), nn.ReLU(), nn.Linear(K, K), nn.LayerNorm(K)
        self.drop, self.p = nn.Dropout(0.0), 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc1(self.norm(x)))
        h = F.dropout(h, p=self.p, training=self.training)
        return x + self.fc2(h)


class Dropped(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.drop(self.act(self.fc1(self.norm(x)))))


class Dropping(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5))


class Bypassing(Wrapped):
    """A wrapper that reads its layer's parameters and does not call it, as some adapters do."""

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Exchanging(Wrapped):
    """A wrapper that has another weight for the time of its call, as peft's of ``target_parameters``."""

    def forward(self, x: Tensor) -> Tensor:
        own = self.base_layer.weight
        self.base_layer.weight = nn.Parameter(own.detach() * 2)
        y = super().forward(x)
        self.base_layer.weight = own
        return y


def twice(_: nn.Module, dx: Any, __: Any) -> Any:
    return tuple(2 * each for each in dx)


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(K, 4, N, dropout=0.0, batch_first=True)


def wrapper(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module)  # type: ignore[no-untyped-call,no-any-return]


def put(name: str, make: Callable[[Any], Any]) -> Callable[..., None]:
    def do(m: Any, *_: Any) -> None:
        part, _, key = name.rpartition(".")
        holder = m.get_submodule(part)
        setattr(holder, key, make(getattr(holder, key)))

    return do


def hook(name: str, register: str, hook: Callable[..., Any]) -> Callable[..., None]:
    return lambda m, *_: getattr(m.get_submodule(name), register)(hook)


class Change(NamedTuple):
    """What is done to two blocks after ``sparsify_``, and how many layers of them then run in a call in training."""

    do: Callable[[Any, Any], object]
    make: Callable[[], Any] = Residual
    run: int = 1


CHANGES = {
    "nothing": Change(lambda *_: None, run=2),
    "fc1 adapted": Change(put("fc1", Adapter)),
    "fc1 replaced": Change(put("fc1", lambda _: nn.Linear(K, K))),
    "fc1 left out": Change(put("fc1", lambda _: nn.Identity())),
    "fc1 wrapped": Change(put("fc1", Wrapped), run=2),
    "fc1 bypassed": Change(put("fc1", Bypassing)),
    "fc1 exchanged for a call": Change(put("fc1", Exchanging)),
    # the adapter needs what the layer does not
    "fc2 adapted": Change(put("fc2", Adapter), run=2),
    "fc2 exchanged for a call": Change(put("fc2", Exchanging), run=2),
    "fc2 of any width": Change(put("fc2", lambda _: nn.AdaptiveAvgPool1d(K))),
    "fc2 of a part": Change(put("fc2", Dropping)),
    "fc2 followed": Change(put("fc2", lambda fc2: nn.Sequential(fc2, nn.Identity())), run=2),
    "both bypassed": Change(lambda m, _: (put("linear1", Bypassing)(m), put("linear2", Bypassing)(m)), encoder),
    "fc2 of another": Change(lambda a, b: setattr(a, "fc2", b.fc2)),
    "fc2 of a copy": Change(lambda a, b: setattr(a, "fc2", copy.deepcopy(b.fc2))),
    "fc1 of another": Change(lambda a, b: setattr(a, "fc1", b.fc1)),
    "swapped": Change(lambda a, b: (first := a.fc2, setattr(a, "fc2", b.fc2), setattr(b, "fc2", first)), run=0),
    "tied": Change(lambda a, b: (setattr(b, "fc1", a.fc1), setattr(b, "fc2", a.fc2)), run=2),
    "act": Change(put("act", lambda _: nn.GELU())),
    "act of a child": Change(put("intermediate.intermediate_act_fn", lambda _: nn.GELU()), Split),
    "act left out": Change(put("act", lambda _: nn.Identity())),
    "the same act": Change(put("act", lambda _: nn.ReLU()), run=2),
    "dropout by p": Change(lambda m, _: setattr(m, "p", 0.5)),
    "dropout": Change(lambda m, _: setattr(m.drop, "p", 0.5), Dropped),
    "dropout of torch's": Change(lambda m, _: setattr(m.dropout, "p", 0.5), encoder),
    "dropout of a layer": Change(lambda m, _: setattr(m.dropout, "p", 0.5), Wi),
    "checkpointed": Change(put("intermediate", wrapper), Split, 2),
    "fc1 checkpointed": Change(put("fc1", wrapper), run=2),
    "fc2 checkpointed": Change(put("fc2", wrapper), run=3),
    "fc2 compiled": Change(put("fc2", lambda fc2: torch.compile(fc2, backend="eager")), run=2),
    "fc1 compiled in place": Change(lambda m, _: m.fc1.compile(backend="eager"), run=2),
    "fc2 not compiled": Change(lambda m, _: setattr(m.fc2, "forward", torch.compiler.disable(m.fc2.forward)), run=2),
    "fc1 parametrized": Change(lambda m, _: parametrize.register_parametrization(m.fc1, "weight", Scaled())),
    "fc2 parametrized": Change(lambda m, _: parametrize.register_parametrization(m.fc2, "weight", Scaled()), run=2),
    "fc2 normalised": Change(put("fc2", lambda fc2: spectral_norm(fc2))),
    "hook on fc1": Change(hook("fc1", "register_forward_hook", lambda _, __, y: 2 * y)),
    "hook on fc1, backward": Change(hook("fc1", "register_full_backward_hook", twice)),
    "hook on act": Change(hook("act", "register_forward_hook", lambda _, __, y: y - 0.5)),
    "hook on act, in place": Change(
        hook("act", "register_forward_pre_hook", lambda _, given: (given[0].add_(1), None)[1])
    ),
    "hook before fc2": Change(hook("fc2", "register_forward_pre_hook", lambda _, given: (given[0] + 1,))),
    "hook on fc2, backward": Change(hook("fc2", "register_full_backward_hook", twice)),
}


BEFORE_2_13 = torch.torch_version.TorchVersion(torch.__version__) < "2.13"
# an older torch does not see hooks that come after a graph, and takes no output but tensors of a checkpoint
NOT_BEFORE_2_13 = ("hook", "checkpointed", "fc1 checkpointed")


# compiling takes 5 s each
IN_GRAPHS = ("fc2 checkpointed", "fc1 parametrized", "hook on act", "tied")


@pytest.mark.parametrize(
    ("change", "how"),
    [(change, "eager") for change in CHANGES]
    + [pytest.param(change, "graph", marks=[pytest.mark.nightly] * (change not in IN_GRAPHS)) for change in CHANGES],
)
def test_what_is_changed_later_computes_what_it_would_without_twell(
    change: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    do, make, run = CHANGES[change]
    if how == "graph" and ("compiled" in change or (BEFORE_2_13 and change.startswith(NOT_BEFORE_2_13))):
        return
    torch._dynamo.reset()
    torch.manual_seed(0)
    dense = nn.Sequential(make(), make())
    sparse = take(copy.deepcopy(dense), strategy="union")
    called = torch.compile(sparse, backend="eager") if how == "graph" else sparse
    before = list(CHANGES).index(change) % 2
    if before:
        called(tokens())
    for m in (dense, sparse):
        torch.manual_seed(2)
        do(*m)
    if "hook" not in change and "parametrized" not in change and "compiled" not in change and not before:
        sparse = pickled(copy.deepcopy(sparse))
        called = torch.compile(sparse, backend="eager") if how == "graph" else sparse
    runs: list[Any] = []
    if how == "eager":
        of = twell.call.functional.run
        monkeypatch.setattr(twell.call.functional, "run", lambda *args: (runs.append(args), of(*args))[1])
    for training, autocast in ((True, False), (False, False), (True, True))[: 3 if how == "eager" else 2]:
        results = []
        for m, call in ((dense, dense), (sparse, called)):
            m.train(training)
            torch.manual_seed(1)
            x = tokens(requires_grad=True)
            with torch.autocast("cpu", BF16, enabled=autocast):
                y = call(x).float()
            results.append(
                [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *m.parameters()), allow_unused=True)]
            )
        for wanted, got in zip(*results):
            if wanted is not None:
                rounding = {"rtol": 3e-2, "atol": 3e-2 * float(wanted.abs().max())} if autocast else {}
                torch.testing.assert_close(got, wanted, **rounding)
        if how == "eager" and training and not autocast:
            assert len(runs) == run
            found = layers(sparse[0])
            for layer in found.values():
                layer.record_aux = True
            if run > 1:
                sparse(tokens())
                assert next(iter(found.values())).aux is not None
            for layer in found.values():
                layer.record_aux = False


def test_what_needs_the_whole_hidden_state_is_refused_while_it_is_dropped() -> None:
    for make, do in (CHANGES["dropout by p"][1::-1], CHANGES["dropout of a layer"][1::-1]):
        m = nn.Sequential(make())
        take(m)
        do(m[0], None)
        (layer,) = layers(m).values()
        rows = [(row.kind, row.strategy, "drops values" in row.reason) for row in twell.explain(m)]
        assert rows == [("inference", "dense", False), ("training", "dense", True)]
        layer.accumulate_main_grad = True
        with pytest.raises(NotImplementedError, match=r"set (it|dropouts of the hidden state) to 0"):
            m(tokens())
        layer.accumulate_main_grad = False
        quantised = twell.quantize_(copy.deepcopy(m).bfloat16().eval())
        with torch.no_grad():
            quantised(tokens(BF16))
            with pytest.raises(NotImplementedError, match=r"for inference.*call eval"):
                quantised.train()(tokens(BF16))
    layer.record_aux = True
    m(tokens())
    assert layer.aux.l0 > N / 4
    pair = take(nn.Sequential(Residual()))
    pair[0].p = 0.5
    for watch in (twell.count_firing(pair), recipe.SparsityTracker(pair).watch(0)):
        with pytest.raises(NotImplementedError, match=r"are of a whole layer, got .*set dropouts"), watch:
            pair(tokens())


def test_explain_says_that_an_adapter_took_the_hidden_state() -> None:
    model = take(nn.Sequential(Residual()), strategy="union").bfloat16()
    base = model[0].fc1
    for module, strategy in ((base, "union"), (Adapter(base), "dense"), (base, "union")):
        model[0].fc1 = module
        model(tokens(BF16))
        (row,) = twell.explain(model)
        assert (row.strategy, "__add__ used what the first of the pair fc1, fc2 returns" in row.reason) == (
            strategy,
            strategy == "dense",
        )


def test_inputs_and_modes_that_change_between_the_layers_are_refused() -> None:
    block = take(nn.Sequential(Residual()))[0]
    x = torch.randn(3, K)
    torch.testing.assert_close(block.fc2(F.relu(block.fc1(x))), block.fc2(block.act(block.fc1(x))))
    h = block.act(block.fc1(x))
    x.add_(1)
    with pytest.raises(NotImplementedError, match="was changed since"):
        block.fc2(h)
    for of in ("fc1", "fc2"):
        tried = take(nn.Sequential(Residual()))[0]
        setattr(tried, of, checkpoint_wrapper(getattr(tried, of), checkpoint_impl=CheckpointImpl.REENTRANT))
        with pytest.raises(NotImplementedError, match="with use_reentrant=False"):
            tried(torch.randn(3, K, requires_grad=True))
    grads = []
    for y_of in (block, lambda x: checkpoint(block, x, use_reentrant=True)):
        x = torch.ones(3, K, requires_grad=True)
        y_of(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    with torch.inference_mode():
        block(torch.randn(3, K))


def test_weights_that_change_before_the_product_are_refused() -> None:
    """It would be of the new ones: of a wrapper that exchanges them for the time of the call, or of a kept tensor."""
    block = take(nn.Sequential(Residual()))[0]
    x, weight = torch.randn(3, K), block.fc1.weight
    for change in (lambda: weight.mul_(2), lambda: setattr(weight, "data", weight.data.clone())):
        kept = block.fc1(x)
        with torch.no_grad():
            change()
        for use in (lambda: kept + 1, lambda: block.fc2(block.act(kept))):  # noqa: B023
            with pytest.raises(NotImplementedError, match="was changed since"):
                use()


class Straight(torch.autograd.Function):
    """h, whose gradient passes."""

    @staticmethod
    def forward(ctx: Any, h: Any) -> Any:
        return h * 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


def test_code_that_knows_tensors_alone_leaves_out_no_gradient() -> None:
    block = take(nn.Sequential(Residual()))[0]
    for used in (False, True):
        h = block.act(block.fc1(torch.randn(3, K)))
        if used:
            assert (h > 0).any()
        with pytest.raises(NotImplementedError, match="or all without, got one of each"):
            Straight.apply(h)


def test_a_forward_set_on_the_second_layer_is_refused() -> None:
    block = take(nn.Sequential(Residual()))[0]
    own, x = block.fc2.forward, torch.randn(3, K)
    y = block(x)
    # as accelerate does when it takes its hooks away
    block.fc2.forward = own
    torch.testing.assert_close(block(x), y, rtol=0, atol=0)
    block.fc2.forward = lambda h: own(h.clamp(max=0.1))
    with pytest.raises(NotImplementedError, match="fc2 of a twell pair must keep its forward"):
        block(x)


def test_code_between_the_layers_sees_tensors() -> None:
    block = take(nn.Sequential(Block()))[0]
    x = torch.randn(2, 3, K)
    dense = F.linear(x, block.fc1.weight, block.fc1.bias)
    for h, wanted in ((block.fc1(x), dense), (block.activation_fn(block.fc1(x)), dense.relu())):
        assert (h.dtype, h.device, h.shape) == (wanted.dtype, wanted.device, wanted.shape)
        assert torch.equal(h.to(torch.float64), wanted.double())
        for of in (lambda t: t + 1, lambda t: 1 - t, lambda t: t > 0, lambda t: t[1], lambda t: (t @ t.mT).sum(), abs):
            assert torch.equal(of(h), of(wanted))
        assert torch.equal(torch.cat([h, wanted]), torch.cat([wanted, wanted]))
        # the tensor's own, not what the pair keeps
        assert h.grad is None
        h.data = h.data.clamp(max=0.1)
        h **= 2
        torch.testing.assert_close(h + 0, wanted.clamp(max=0.1) ** 2)
        h = wanted
        assert (len(h), h.max().item()) == (2, wanted.max().item())
    with torch.autocast("cpu", BF16):
        h = block.fc1(x)
        assert (h.dtype, h.to(torch.float32).dtype, h.to(torch.float32).sum().dtype) == (
            BF16,
            torch.float32,
            torch.float32,
        )


def test_what_runs_dense_is_told(caplog: pytest.LogCaptureFixture) -> None:
    m = take(nn.Sequential(Block().eval()))
    with caplog.at_level(logging.WARNING, "twell"):
        with twell.count_firing(m):
            m(tokens())
        # twell's own hooks are fine
        assert "runs dense" not in caplog.text
        for name, do in (
            ("its fc1 has hooks", hook("fc1", "register_forward_hook", lambda *_: None)),
            ("gelu uses what", put("activation_fn", lambda _: nn.GELU())),
            ("fc2, which has hooks", hook("fc2", "register_forward_hook", lambda *_: None)),
            ("its fc2 is given", put("fc1", lambda _: nn.Linear(K, N))),
        ):
            warn_once.cache_clear()
            changed = copy.deepcopy(m)
            do(changed[0])
            changed(tokens())
            assert f"a twell pair runs dense: {name}" in caplog.text
