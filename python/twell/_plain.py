"""Whether calling a projection does what its weights say and no more: no hooks, subclasses, overrides of operators."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import linear as _linear
from torch.nn.modules import module as _module

from twell import _auto

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
# torch's tensors that stand for plain ones
_STAND_INS = ("torch._subclasses", "torch.distributed")

# What calling an nn.Linear runs, None where it was replaced before this import, and the hooks of all modules.
_CALL = nn.Module.__call__ if getattr(nn.Module.__call__, "__globals__", None) is vars(_module) else None
_FORWARD = nn.Linear.forward if getattr(nn.Linear.forward, "__globals__", None) is vars(_linear) else None
_LINEAR = F.linear if isinstance(F.linear, types.BuiltinFunctionType) else None
HOOKS_OF_ALL = (
    *(_module._global_forward_pre_hooks, _module._global_forward_hooks),
    *(_module._global_backward_pre_hooks, _module._global_backward_hooks),
)


def behaves(value: Tensor | None) -> bool:
    """Whether operators do with a tensor of a subclass what they do with any: not with quantised weights, say."""
    kind: Any = type(value)
    if kind in PLAIN_TENSORS or value is None or kind.__module__.startswith(_STAND_INS):
        return True
    bases = (base for base in kind.__mro__ if base not in (*PLAIN_TENSORS, torch._C.TensorBase))
    return not any(vars(base).keys() & {"__torch_function__", "__torch_dispatch__"} for base in bases)


def overridden(operands: Mapping[str, Tensor]) -> str:
    """Which operand or mode of a call overrides what PyTorch's operators do; "" if none."""
    for argument, value in operands.items():
        if not behaves(value):
            return f"{argument}, a {type(value).__name__},"
    for i in range(torch._C._len_torch_function_stack()):
        kind = type(torch._C._get_function_stack_at(i))
        # torch's own say on which device tensors are made, or trace
        if not kind.__module__.startswith("torch."):
            return f"the TorchFunctionMode {kind.__name__}"
    return ""


def calls_are_torchs() -> bool:
    """Whether an ``nn.Linear`` that is called runs torch's own code, which libraries replace for all modules."""
    # torch.export replaces the call of every module while it traces
    called = nn.Linear.__call__ is _CALL or _auto._exporting()
    return called and nn.Linear.forward is _FORWARD and F.linear is _LINEAR


def is_plain(child: nn.Module) -> bool:
    """Whether calling ``child`` does what nn.Linear does with its weight and bias, and nothing else."""
    own, kind = vars(child), type(child)
    if kind.forward is not nn.Linear.forward or kind.__call__ is not nn.Linear.__call__:
        return False
    # accelerate wraps each forward; unless it also brings the weights in, that changes nothing
    if _replaced(child) and getattr(own.get("_hf_hook"), "offload", True):
        return False
    if child._forward_pre_hooks or child._forward_hooks or child._backward_pre_hooks or child._backward_hooks:
        return False
    for parameter in child._parameters.values():
        if not behaves(parameter):
            return False
    return True


def _replaced(child: nn.Module) -> bool:
    """Whether ``child`` has a ``forward`` set on the instance, which compiled graphs must notice later, too."""
    if not torch.compiler.is_compiling():
        return "forward" in vars(child)
    # a key that is absent has no guard, what the attribute is has one
    forward: Any = child.forward
    own = isinstance(forward, types.MethodType) and forward.__func__ is type(child).forward
    return not (own and forward.__self__ is child)
