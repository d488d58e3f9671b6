"""What habits share: results, their comparison, gradients, and the operators that run."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.habits.entries import BY_TOKEN, Call
from twell.testing import assert_same

# the first operand of a model of peft is "input"
OF_TOKENS = (*BY_TOKEN, "input")


def results(found: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(found) if isinstance(t, Tensor)]


def same(found: Any, expected: Any, what: str = "values") -> None:
    ours, theirs = results(found), results(expected)
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs):
        assert_same(one.detach(), other.detach(), what)


def close(ours: Tensor, theirs: Tensor) -> None:
    """Equal, except for how sums in another order round."""
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7 * max(1.0, float(theirs.abs().max())))


def rows(given: dict[str, Any], m: int) -> dict[str, Any]:
    return {a: t[:m] if a in OF_TOKENS else t for a, t in given.items()}


def floating(given: dict[str, Any]) -> list[str]:
    return [a for a, t in given.items() if isinstance(t, Tensor) and t.is_floating_point()]


def gradients(call: Call, run: Any = None, **changed: Any) -> list[Tensor]:
    """y and its gradients: of a loss of integers, for parameters or operands, and for x."""
    given = {**call.given, **changed}
    for name in floating(given):
        given[name] = given[name].detach().requires_grad_()
    leaves = [given[name] for name in floating(given)]
    leaves += [p for p in call.leaves() if p.requires_grad] if call.is_module else []
    y = (call.run if run is None else run)(**given)
    found = torch.autograd.grad(y, leaves, upstream(y), allow_unused=True)
    return [y, *(g for g in found if g is not None)]


def upstream(y: Tensor) -> Tensor:
    return (torch.arange(y.numel(), device="cpu") % 5 - 2).view(y.shape).to(y)


class Operators(TorchDispatchMode):
    """Keeps this package's operators that have run, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        if op.namespace == "twell":
            self.calls.append((op, args, kwargs or {}))
        return found


def tokens_of(given: dict[str, Any]) -> dict[str, Tensor]:
    return {a: t for a, t in given.items() if a in OF_TOKENS}
