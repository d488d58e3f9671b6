"""Forward-mode AD and the transforms of torch.func: right by "auto" and "dense", refused by "row" and "union"."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad

import twell
from tests.habits.derivatives import DERIVATIVES, by_torch, tangent_of
from twell import ops
from twell.nn.layers import SparseGatedMLP, SparseMLP

BF16 = torch.bfloat16
M, K, N = 5, 8, 24
Function = Callable[[Tensor], Tensor]

GATED = ("x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
PLAIN = ("x", "w_up", "w_down", "b_up", "b_down")


def draw(names: tuple[str, ...]) -> dict[str, Tensor]:
    shapes = {"x": (M, K), "w_gate": (N, K), "w_up": (N, K), "w_down": (K, N), "b_gate": (N,), "b_up": (N,)}
    return {name: torch.randn(shapes.get(name, (K,))).to(BF16) for name in names}


def ffn(t: dict[str, Tensor], strategy: Any, **options: Any) -> Any:
    strategy = twell.AutoStrategy() if strategy == "site" else strategy
    function = twell.sparse_gated_ffn if "w_gate" in t else twell.sparse_ffn
    return function(**t, strategy=strategy, **options)


def of_x(t: dict[str, Tensor], strategy: Any) -> Function:
    return lambda x: ffn({**t, "x": x}, strategy)


@pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
def test_modules_through_functional_call(cls: Any) -> None:
    mlp = cls(K, N, bias=True, dtype=BF16)
    parameters = {name: p.detach() for name, p in mlp.named_parameters()}
    x, tangents = torch.randn(M, K).to(BF16), {name: torch.randn_like(p) for name, p in parameters.items()}

    def call(parameters: dict[str, Tensor]) -> Tensor:
        y, aux = func.functional_call(mlp, parameters, (x,), {"return_aux": True})
        return y.float().sum() + aux.l1

    results = []
    for strategy in ("auto", "dense"):
        mlp.strategy = strategy
        per_sample = func.vmap(func.grad(lambda p, x: func.functional_call(mlp, p, (x,)).sum()), (None, 0))
        results.append((func.jvp(call, (parameters,), (tangents,)), func.grad(call)(parameters)))
        results[-1] += (per_sample(parameters, x),)
    torch.testing.assert_close(*results)
    assert results[0][0][1] != 0
    for strategy in ("row", "union"):
        mlp.strategy = strategy
        # no transform: as the module itself
        with torch.no_grad():
            assert torch.equal(func.functional_call(mlp, parameters, (x,)), mlp(x))
        for derive in (lambda: func.jvp(call, (parameters,), (tangents,)), lambda: func.grad(call)(parameters)):
            with pytest.raises(NotImplementedError, match="takes plain tensors"):
                derive()


@pytest.mark.parametrize(("names", "strategy"), [(GATED, "row"), (PLAIN, "union")])
def test_untransformed_calls_run_as_named(names: tuple[str, ...], strategy: str) -> None:
    """A frozen layer whose operands are not transformed, in a function that is."""
    t, ran = draw(names), []
    expected = ffn(t, strategy)

    def loss(scale: Tensor) -> Tensor:
        ran.append(ffn(t, strategy))
        return (ran[-1] * scale).double().sum()

    scale = torch.ones(M, K, dtype=BF16)
    torch.testing.assert_close(func.grad(loss)(scale), expected)
    with forward_ad.dual_level():
        torch.testing.assert_close(
            forward_ad.unpack_dual(loss(forward_ad.make_dual(scale, scale))).tangent, loss(scale)
        )
    t["w_down"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"got gradients that pass a transform of torch\.func"):
        func.grad(loss)(scale)


@pytest.mark.parametrize(("names", "strategy"), [(GATED, "row"), (PLAIN, "union"), (PLAIN, "auto")])
def test_gradients_with_tangents_are_right_or_refused(names: tuple[str, ...], strategy: str) -> None:
    t = {name: value.requires_grad_() for name, value in draw(names).items()}
    y, own = ffn(t, strategy), tuple(t.values())
    dy, tangent = torch.randn(2, M, K).to(BF16)
    with forward_ad.dual_level():
        upstream = forward_ad.make_dual(dy, tangent)
        # on a CPU "auto" is dense, too
        if strategy in ("row", "union"):
            with pytest.raises(
                NotImplementedError, match="no derivative: expected no input with a forward-mode tangent"
            ):
                torch.autograd.grad(y, own, upstream)
            return
        found = [forward_ad.unpack_dual(g).tangent for g in torch.autograd.grad(y, own, upstream, retain_graph=True)]
    torch.testing.assert_close(found, list(torch.autograd.grad(y, own, tangent)))


@pytest.mark.parametrize(("names", "strategy"), [(GATED, "auto"), (GATED, "union"), (PLAIN, "dense")])
def test_main_gradients_take_those_of_a_plain_backward_pass(names: tuple[str, ...], strategy: str) -> None:
    t = draw(names)
    weights = [name for name in names if name.startswith("w_")]
    for name in weights:
        t[name].requires_grad_()
    mains = [torch.zeros(t[name].shape) for name in weights]
    for derivative in ("jvp", "grad", "dual"):
        with pytest.raises(NotImplementedError, match="main_grads take the gradients of a plain backward pass, got x "):
            DERIVATIVES[derivative](lambda x: ffn({**t, "x": x}, strategy, main_grads=mains), t["x"], t["x"])
    y = ffn(t, strategy, main_grads=mains)
    own = [t[name] for name in weights]
    with pytest.raises(NotImplementedError, match="plain backward pass, got a batch of them"):
        torch.autograd.grad(y, own, torch.ones(3, M, K, dtype=BF16), is_grads_batched=True, allow_unused=True)
    y = ffn(t, strategy, main_grads=mains)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="got some with forward-mode tangents"):
        torch.autograd.grad(y, own, forward_ad.make_dual(y.detach(), y.detach()), allow_unused=True)
    assert not any(main.any() for main in mains)


def test_operators_refuse_tangents() -> None:
    x, weight = torch.randn(M, K).to(BF16), torch.randn(N, K).to(BF16)
    calls: dict[str, Function] = {
        "gate_pack": lambda x: ops.gate_pack(x, weight, None, 8),
        "hybrid_forward": lambda x: ops.hybrid_forward(x, weight, weight, weight, None, None, None, 8),
        "reglu": lambda x: ops.reglu(x, x),
    }
    for (name, call), grad in itertools.product(calls.items(), (True, False)):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(NotImplementedError, match=f"torch.ops.twell.{name} has no derivative: expected no input"),
        ):
            tangent_of(call, x, x)


@pytest.mark.parametrize("derivative", ["grad", "jvp", "vmap"])
def test_compiled_transforms(derivative: str) -> None:
    torch.compiler.reset()
    t, take = draw(GATED), DERIVATIVES[derivative]
    compiled = torch.compile(lambda x, s: take(of_x(t, s), x, x), backend="aot_eager")
    torch.testing.assert_close(compiled(t["x"], "auto"), take(lambda x: by_torch({**t, "x": x}), t["x"], t["x"]))
    with pytest.raises(NotImplementedError, match='strategy="union" takes plain tensors'):
        compiled(t["x"], "union")


def test_a_compiled_call_meets_tangents() -> None:
    torch.compiler.reset()
    t = draw(GATED)
    compiled = torch.compile(of_x(t, "auto"), backend="aot_eager")
    # a graph made inside the level is dense
    expected = tangent_of(lambda x: by_torch({**t, "x": x}), t["x"], t["x"])
    torch.testing.assert_close(tangent_of(compiled, t["x"], t["x"]), expected)
    compiled = torch.compile(of_x(t, "union"), backend="aot_eager")
    compiled(t["x"])
    with pytest.raises(NotImplementedError, match="expected no input with a forward-mode tangent"):
        tangent_of(compiled, t["x"], t["x"])
