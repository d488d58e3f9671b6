"""Columns of derivatives: transforms, autocast, backward passes, main gradients, classes that override operators."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, func, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.habits.calls import close, floating, gradients, results, same, upstream
from tests.habits.entries import LAYOUTS, Call, Entry
from twell.nn.layers import SparseFFN

BF16 = torch.bfloat16


def tangent_of(f: Callable[[Tensor], Any], x: Tensor, t: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent


def total(f: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).double().sum()


# each takes a function of an operand, the operand and a tangent
DERIVATIVES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "dual": tangent_of,
    "dual of what requires grad": lambda f, x, t: tangent_of(f, x.clone().requires_grad_(), t),
    "jvp": lambda f, x, t: func.jvp(f, (x,), (t,)),
    "jacfwd": lambda f, x, t: func.jacfwd(f)(x),
    "grad": lambda f, x, t: func.grad(total(f))(x),
    "vjp": lambda f, x, t: func.vjp(f, x)[1](torch.ones_like(f(x))),
    "jacrev": lambda f, x, t: func.jacrev(f)(x),
    "vmap": lambda f, x, t: func.vmap(f)(torch.stack((x, t))),
    "gradients per sample": lambda f, x, t: func.vmap(func.grad(total(f)))(torch.stack((x, t))),
    "hessian": lambda f, x, t: func.hessian(total(f))(x),
    "forward over reverse": lambda f, x, t: func.jvp(func.grad(total(f)), (x,), (t,)),
    "reverse over forward": lambda f, x, t: func.grad(lambda x: func.jvp(f, (x,), (t,))[1].double().sum())(x),
}


def by_torch(t: dict[str, Tensor]) -> Tensor:
    up = F.linear(t["x"], t["w_up"], t["b_up"])
    hidden = F.relu(F.linear(t["x"], t["w_gate"], t["b_gate"])) * up if "w_gate" in t else F.relu(up)
    return F.linear(hidden, t["w_down"], t["b_down"])


def transforms(entry: Entry) -> None:
    """Under transforms of torch.func and forward mode "auto" is plain PyTorch, and a named strategy refuses by name."""
    call, free, dense = entry.call(), entry.call("auto"), entry.call("dense")
    right = (lambda **t: by_torch({**dense.given, **t})) if "dense" in entry.absent else dense
    for i, (kind, take) in enumerate(DERIVATIVES.items()):
        for name in floating(call.given) if i < 3 or kind == "vmap" else ["x"]:
            value = call.given[name]
            tangent = torch.ones_like(value)
            with pytest.raises(NotImplementedError) as refused:
                take(lambda t, a=name: call(**{a: t}), value, tangent)
            assert entry.transformed.format(name) in str(refused.value), (kind, refused.value)
            if "auto" not in entry.absent:
                ours, theirs = (take(lambda t, a=name, c=c: c(**{a: t}), value, tangent) for c in (free, right))
                torch.testing.assert_close(ours, theirs)


LATE = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


class Doubled(nn.Parameter):
    """A tensor that changes the result of PyTorch's operators."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return 2 * found if func is F.linear else found


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return 2 * found if func is F.linear else found


def overrides(entry: Entry) -> None:
    """An operand of a class, or a mode, that overrides PyTorch's operators makes a call dense, compiled too."""
    call, dense = entry.call(), entry.call("dense")
    for name in (*floating(call.given), ""):
        odd = {name: Doubled(call.given[name], requires_grad=False)} if name else {}
        with torch.no_grad(), nullcontext() if name else Doubling():
            expected = dense(**odd)
            same(call(**odd), expected, f"with {name}")
            # Dynamo left graphs at such a class before
            if not call.is_module and (not name or (name == "x" and LATE)):
                torch.compiler.reset()
                # run as it is, a graph would meet the mode a second time
                backend = "eager" if name else "aot_eager"
                same(torch.compile(lambda odd=odd: call(**odd), backend=backend, fullgraph=True)(), expected)


def autocast(entry: Entry) -> None:
    """float32 under autocast is 16 bits; gradients come back in float32, and backward under it casts nothing again."""
    call, wide = entry.call(), entry.call()
    if wide.is_module and "scales" not in entry.line:
        wide.run.float()
    # biases of e4m3 weights are bfloat16
    cast = ["x"] if "scales" in entry.line else floating(call.given)
    given = {a: t.float() if a in cast else t for a, t in call.given.items()}
    with torch.no_grad(), torch.autocast("cpu", BF16):
        found = results(wide.run(**given))
    assert found[0].dtype in (BF16, torch.int32)
    with torch.no_grad():
        same(found, call())
    if "backward" in entry.absent:
        return
    right = gradients(call)
    for inside in (False, True):
        leaves = {a: t.detach().requires_grad_() if a in floating(given) else t for a, t in given.items()}
        own = [leaves[a] for a in floating(leaves)] + (wide.leaves() if wide.is_module else [])
        with torch.autocast("cpu", BF16):
            y = wide.run(**leaves)
            dy = upstream(y)
            grads = torch.autograd.grad(y, own, dy, allow_unused=True) if inside else ()
        grads = grads or torch.autograd.grad(y, own, dy, allow_unused=True)
        assert all(g.dtype == torch.float32 for g in grads if g is not None)
        # a layer whose sum rounds once has these bits
        for ours, theirs in zip([g for g in grads if g is not None], right[1:], strict=True):
            close(ours, theirs.float())


def backward(entry: Entry) -> None:
    """Second passes, checkpoints and subsets have the first gradients; a change meanwhile raises or does nothing."""
    call = entry.call()
    right = gradients(call)
    given = {a: t.detach().requires_grad_() if a in floating(call.given) else t for a, t in call.given.items()}
    leaves = [given[a] for a in floating(given)] + (call.leaves() if call.is_module else [])

    def run(*tensors: Tensor) -> Tensor:
        return call.run(**given | dict(zip(floating(given), tensors)))  # type: ignore[no-any-return]

    tokens = [given[a] for a in floating(given)]
    for reentrant in (None, False, True):
        y = run(*tokens) if reentrant is None else checkpoint(run, *tokens, use_reentrant=reentrant)
        dy = upstream(y)
        if reentrant:
            for leaf in leaves:
                leaf.grad = None
            y.backward(dy)
            found = [leaf.grad for leaf in leaves]
        else:
            found = list(torch.autograd.grad(y, leaves, dy, allow_unused=True, retain_graph=True))
            same([g for g in torch.autograd.grad(y, leaves, dy, allow_unused=True) if g is not None], right[1:])
            with pytest.raises(RuntimeError, match="second time"):
                torch.autograd.grad(y, leaves, dy, allow_unused=True)
        same([g for g in found if g is not None], right[1:], f"reentrant={reentrant}")
    for kind, layout in LAYOUTS.items():
        if "class" not in kind and "inference" not in kind:
            y = run(*tokens)
            same(
                [g for g in torch.autograd.grad(y, leaves, layout(dy), allow_unused=True) if g is not None],
                right[1:],
                kind,
            )
    y = run(*tokens)
    for leaf, expected in zip(leaves, torch.autograd.grad(y, leaves, dy, allow_unused=True, retain_graph=True)):
        assert leaf.is_contiguous() or leaf.t().is_contiguous()
        if expected is None:
            continue
        # as the leaf is stored, so that optimisers see one layout
        assert expected.is_contiguous() == leaf.is_contiguous()
        (alone,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
        same(alone, expected)
    # the same where nothing else needs a gradient
    for leaf, expected in zip(leaves, torch.autograd.grad(y, leaves, dy, allow_unused=True, retain_graph=True)):
        for other in leaves:
            other.requires_grad_(other is leaf)
        if expected is not None:
            close(torch.autograd.grad(run(*tokens), leaf, dy)[0], expected)
    for leaf in leaves:
        leaf.requires_grad_()
    batch = torch.stack((dy, -dy))
    batched = torch.autograd.grad(y, leaves, batch, is_grads_batched=True, allow_unused=True, retain_graph=True)
    for each, expected in zip([g for g in batched if g is not None], right[1:], strict=True):
        close(each, torch.stack((expected, -expected)))
    first = torch.autograd.grad(y, leaves[0], dy, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match=r'no second derivative, got .*use strategy="dense"'):
        first.float().sum().backward()
    for leaf in leaves:
        y = run(*tokens)
        expected = torch.autograd.grad(y, leaves, dy, allow_unused=True, retain_graph=True)
        with torch.no_grad():
            leaf.mul_(2)
        try:
            found = torch.autograd.grad(y, leaves, dy, allow_unused=True)
        except (RuntimeError, NotImplementedError) as error:
            if not re.search("modified by an inplace operation|changed in place after", str(error)):
                raise
        else:
            # the call had read all of it, or made a copy
            same(found, expected)
        with torch.no_grad():
            leaf.div_(2)


def mains(entry: Entry) -> None:
    """``accumulate_main_grad`` adds weights' gradients to ``main_grad`` in fp32, and leaves ``grad`` alone."""
    for strategy in (entry.strategy, "dense"):
        mains_of(entry.call(strategy))


def mains_of(call: Call) -> None:
    owners = [m for m in call.run.modules() if isinstance(m, SparseFFN)]
    weights = [p for p in call.run.parameters() if p.dim() == 2]
    dy = torch.ones_like(call())
    torch.autograd.backward(call(), dy)
    expected = {p: p.grad.clone() for p in call.run.parameters() if p.grad is not None}
    call.run.zero_grad()
    for owner in owners:
        owner.accumulate_main_grad = True
    for p in weights:
        p.main_grad = torch.full(p.shape, 3.0)  # type: ignore[attr-defined]
    for _ in range(2):
        torch.autograd.backward(call(), dy)
    for p, once in expected.items():
        if any(p is weight for weight in weights):
            assert p.grad is None
            torch.testing.assert_close(p.main_grad - 3, 2 * once.float(), rtol=1e-2, atol=1e-4)
        else:
            same(p.grad, once + once)
    # frozen weights need none
    for p in weights:
        p.requires_grad_(False)
        del p.main_grad  # type: ignore[attr-defined]
    call()
