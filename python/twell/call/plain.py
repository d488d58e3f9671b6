"""Whether calling a projection applies its weights and nothing else: no hooks, subclasses, overrides of operators."""

import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import linear as _linear
from torch.nn.modules import module as _module

from twell.runtime import modes
from twell.runtime.modes import PLAIN_TENSORS

# torch's own subclasses, such as fake and distributed tensors, count as plain
_STAND_INS = ("torch._subclasses", "torch.distributed")

# The functions that a call of nn.Linear runs, None where one was replaced before this import; the attributes of modules
# that hold the hooks of their calls; and the global hooks.
_CALL = nn.Module.__call__ if getattr(nn.Module.__call__, "__globals__", None) is vars(_module) else None
_FORWARD = nn.Linear.forward if getattr(nn.Linear.forward, "__globals__", None) is vars(_linear) else None
_LINEAR = F.linear if isinstance(F.linear, types.BuiltinFunctionType) else None
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_LINEARS = frozenset(vars(nn.Linear(1, 1, device="meta"))) | {"_is_hf_initialized", "_hf_hook", "_old_forward"}
HOOKS_OF_ALL = tuple(getattr(_module, f"_global{hooks}") for hooks in HOOKS)


def behaves(value: Tensor | None) -> bool:
    """Whether operators treat ``value`` as a plain tensor, which they do not for quantised weights, say."""
    kind: Any = type(value)
    if kind in PLAIN_TENSORS or value is None or kind.__module__.startswith(_STAND_INS):
        return True
    bases = (base for base in kind.__mro__ if base not in (*PLAIN_TENSORS, torch._C.TensorBase))
    return not any(vars(base).keys() & {"__torch_function__", "__torch_dispatch__"} for base in bases)


def overridden(operands: Mapping[str, Tensor]) -> str:
    """The operand or mode of a call that overrides PyTorch's operators; "" if none."""
    for argument, value in operands.items():
        if not behaves(value):
            return f"a {type(value).__name__} as {argument}"
    for kind in modes.function_modes():
        # torch's own modes set the default device, or trace
        if not kind.__module__.startswith("torch."):
            return f"the TorchFunctionMode {kind.__name__}"
    return ""


def calls_are_torchs() -> bool:
    """Whether calling an ``nn.Linear`` runs torch's own code; libraries may replace it for all modules."""
    # torch.export replaces the call of every module while it traces
    called = nn.Linear.__call__ is _CALL or modes.exporting()
    return called and nn.Linear.forward is _FORWARD and F.linear is _LINEAR


def is_plain(child: nn.Module, alike: tuple[Any, ...] = ()) -> bool:
    """Whether calling ``child`` applies its weight and bias as nn.Linear's forward or one of ``alike``, and no more."""
    kind = type(child)
    # torch.compile of torch 2.11 does not trace what an instance has
    if kind.forward is not nn.Linear.forward and (not alike or own_code(child) not in alike):
        return False
    if kind.__call__ is not nn.Linear.__call__ or not runs_its_class(child):
        return False
    for parameter in child._parameters.values():
        if not behaves(parameter):
            return False
    return True


def runs_its_class(child: nn.Module) -> bool:
    """Whether calling ``child`` runs the forward of its class and no hooks but those that move tensors."""
    if _replaced(child) and not only_moves(child):
        return False
    return not (child._forward_pre_hooks or child._forward_hooks or child._backward_pre_hooks or child._backward_hooks)


def own_code(child: nn.Module) -> tuple[Any, ...]:
    """The forward of a module's class, and what that may read of its instance besides what nn.Linear has."""
    own = {key: value for key, value in vars(child).items() if key not in _OF_LINEARS}
    return type(child).forward, *own.items()


def cast(tensors: Iterable[Tensor | None], dtype: torch.dtype) -> list[Any]:
    """A weight and a bias, say, in another dtype."""
    return [None if t is None else t.to(dtype) for t in tensors]


def only_moves(module: nn.Module) -> bool:
    """Whether a ``forward`` on an instance is accelerate's, whose hooks only move tensors between devices."""
    # a hook that offloads replaces the weights for the time of the call
    hook = vars(module).get("_hf_hook")
    return all(getattr(each, "offload", True) is False for each in getattr(hook, "hooks", (hook,)))


def of_torch(thing: Any) -> bool:
    """Whether a class or a function is torch's."""
    return str(getattr(thing, "__module__", "")).split(".")[0] == "torch"


def _replaced(child: nn.Module) -> bool:
    """Whether ``child`` has another ``forward`` set on the instance; compiled graphs notice a later one, too."""
    # Dynamo guards on the attribute's value, not on an absent key
    return (modes.compiling() or "forward" in vars(child)) and not is_own(child, child.forward)


def is_own(module: nn.Module, forward: Any) -> bool:
    """Whether ``forward`` is that of the module's class: accelerate leaves it on the instance."""
    own = isinstance(forward, types.MethodType) and forward.__func__ is type(module).forward
    return own and forward.__self__ is module
