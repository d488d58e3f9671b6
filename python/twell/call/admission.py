"""Checks of a layer's operands, made once: types, shapes, devices, dtypes, autocast, limits and main gradients."""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from twell.base import memory
from twell.call.plain import behaves
from twell.choose.plan import PACKED_DTYPES, Facts, unpackable
from twell.ops.operands import Layer, Mains
from twell.runtime import modes
from twell.runtime.modes import PLAIN_TENSORS, is_in_memory

_OPTIONAL = ("b_gate", "b_up", "b_down")


def strided(name: str, operands: Mapping[str, Tensor | None], optional: Sequence[str]) -> dict[str, Tensor]:
    """Check types; return the operands that are not None, cast as autocast asks."""
    present = {}
    for argument, value in operands.items():
        if not isinstance(value, Tensor):
            if value is None and argument in optional:
                continue
            raise TypeError(f"{name}: {argument} must be a tensor, got {type(value).__name__}")
        if value.is_nested or value.layout is not torch.strided:
            kind = "a nested tensor" if value.is_nested else value.layout
            raise TypeError(f"{name}: {argument} must be a strided tensor, got {kind}")
        if not (modes.compiling() or is_in_memory(value)):
            # a clone of a pending negation would keep it
            value = value.resolve_neg() if value.is_neg() else value.clone()
        present[argument] = value

    kind = next(iter(present.values())).device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        # as autocast casts the operands of a linear layer
        dtype = torch.get_autocast_dtype(kind)
        return {a: t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for a, t in present.items()}
    return present


def admit(name: str, **operands: Tensor | None) -> dict[str, Tensor]:
    """Check types, shapes, devices and dtypes; return the operands that are not None, cast as autocast asks."""
    present = strided(name, operands, _OPTIONAL)
    x = present["x"]
    if x.dim() == 0:
        raise ValueError(f"{name}: x must be [..., K], got a scalar")
    if not x.is_floating_point():
        raise TypeError(f"{name}: x must have a floating dtype, got {x.dtype}")
    first = present["w_gate" if "w_gate" in present else "w_up"]
    if first.dim() != 2:
        raise ValueError(f"{name}: the first weight must be [N, K], got {list(first.shape)}")
    n, k = first.shape[0], x.shape[-1]
    shapes = {"w_gate": [n, k], "w_up": [n, k], "w_down": [k, n], "b_gate": [n], "b_up": [n], "b_down": [k]}
    require_fitting(name, present, shapes, " (x has K = {}, the first weight N = {})", k, n)
    return present


def admit_given(name: str, given: Layer) -> dict[str, Tensor]:
    """The same of a layer whose gate is given; the operands that are not None under the names of a ``Layer``."""
    operands = {argument: getattr(given, argument) for argument in ("x", "gate", "w_up", "w_down", "b_up", "b_down")}
    t = strided(name, operands, ("x", "w_up", "b_up", "b_down"))
    if ("x" in t) != ("w_up" in t):
        there, missing = ("x", "w_up") if "x" in t else ("w_up", "x")
        raise ValueError(f"{name}: {missing} must be given with {there}, got None")
    if "b_up" in t and "w_up" not in t:
        raise ValueError(f"{name}: b_up must be None without w_up, got a tensor")
    gate, w_down = t["gate"], t["w_down"]
    if not gate.is_floating_point():
        raise TypeError(f"{name}: gate must have a floating dtype, got {gate.dtype}")
    if w_down.dim() != 2:
        raise ValueError(f"{name}: w_down must be [K, N], got {list(w_down.shape)}")
    if gate.dim() == 0:
        raise ValueError(f"{name}: gate must be [..., N], got a scalar")
    (k, n), lead = w_down.shape, list(gate.shape[:-1])
    shapes = {"gate": [*lead, n], "x": [*lead, k], "w_up": [n, k], "b_up": [n], "b_down": [k]}
    require_fitting(name, t, shapes, " (w_down has K = {}, N = {})", k, n)
    return t


def require_fitting(
    name: str, operands: Mapping[str, Tensor], shapes: Mapping[str, list[int]], why: str = "", *sizes: int
) -> None:
    """Raise ValueError for other ``shapes`` or another device than that of the first, TypeError for another dtype."""
    for argument, value in operands.items():
        if argument in shapes and list(value.shape) != shapes[argument]:
            # formatted here alone, since a graph has a guard for each size that is formatted
            expected = f"{shapes[argument]}{why.format(*sizes)}"
            raise ValueError(f"{name}: {argument} must be {expected}, got {list(value.shape)}")
    first = next(iter(operands))
    device, dtype = operands[first].device, operands[first].dtype
    for argument, value in operands.items():
        if value.device != device:
            raise ValueError(f"{name}: {argument} must be on {device} as {first} is, got {value.device}")
        if value.dtype != dtype:
            raise TypeError(f"{name}: {argument} must be {dtype} as {first} is, got {value.dtype}")


def admitted(layer: Layer, gated: bool) -> bool:
    """Whether these are plain tensors in eager mode that the sparse kernels take as they are.

    True answers every question of ``admit``, ``sharded`` and ``plan`` about operands and modes. False says nothing.
    """
    if modes.compiling() or not modes.undisturbed():
        return False
    x, first, up, down, b_first, b_up, b_down = layer[:7]
    for operand in layer:
        kind = type(operand)
        if operand is not None and (kind is Tensor or kind is Parameter):
            if operand.is_nested or operand.layout is not torch.strided or not is_in_memory(operand):
                return False
        elif operand is not None:
            return False
    if x is None or first is None or down is None or (gated and up is None) or not x.dim():
        return False
    dtype, device, shape = x.dtype, x.device, first.shape
    if dtype not in PACKED_DTYPES or len(shape) != 2:
        return False
    n, k = shape
    return (
        _takes(n, k)
        and x.shape[-1] == k
        and _fits(first, shape, dtype, device)
        and _fits(down, (k, n), dtype, device)
        and (up is None or _fits(up, shape, dtype, device))
        and (b_first is None or _fits(b_first, (n,), dtype, device))
        and (b_up is None or _fits(b_up, (n,), dtype, device))
        and (b_down is None or _fits(b_down, (k,), dtype, device))
    )


def _fits(operand: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return operand.shape == shape and operand.dtype == dtype and operand.device == device


@functools.lru_cache(4096)
def _takes(n: int, k: int) -> bool:
    return unpackable(Facts(n=n, k=k, sliced=True)) is None


def sharded(operands: Mapping[str, Tensor]) -> bool:
    """Whether some operands are DTensors; none can be before torch's module of DTensors is imported."""
    for value in operands.values():
        if type(value) not in PLAIN_TENSORS and "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor import DTensor

            if isinstance(value, DTensor):
                return True
    return False


def require_of_neurons(
    name: str, argument: str, value: Any, layer: Layer, expected: str, dtype: torch.dtype | None = None
) -> None:
    """Raise unless this is a plain tensor [N] for the neurons of a layer, and of ``dtype`` if that is given."""
    if not isinstance(value, Tensor) or not behaves(value) or sharded({argument: value}):
        raise TypeError(f"{name}: {argument} must be a plain tensor, got a {type(value).__name__}")
    n, device = len(layer.w_gate), layer.x.device
    if value.shape != (n,) or value.device != device or dtype not in (None, value.dtype):
        got = f"{value.dtype} {list(value.shape)} on {value.device}"
        raise ValueError(f"{name}: {argument} must be {expected} [{n}] on {device}, got {got}")


def needing_grad(operands: Mapping[str, Tensor]) -> list[str]:
    """Names of the operands whose gradient autograd will want from this call."""
    return [argument for argument, value in operands.items() if value.requires_grad] if torch.is_grad_enabled() else []


def admit_mains(
    name: str, operands: Mapping[str, Tensor], given: Mapping[str, Tensor | None], mains: Sequence[Tensor | None] | None
) -> Mains:
    """Check ``mains``, and return those of the weights that need a gradient; ``given``: operands before autocast."""
    if mains is None:
        return Mains()
    weights = [argument for argument in Mains._fields if argument in operands]
    if not isinstance(mains, (tuple, list)) or len(mains) != len(weights):
        got = f"{len(mains)} of them" if isinstance(mains, (tuple, list)) else type(mains).__name__
        raise TypeError(f"{name}: main_grads must be one tensor or None for each of {', '.join(weights)}, got {got}")
    for argument, main in zip(weights, mains):
        weight = operands[argument]
        if main is not None and not (
            isinstance(main, Tensor)
            and not _unwritable(main)
            and main.dtype == torch.float32
            and main.shape == weight.shape
            and main.device == weight.device
            and not main.requires_grad
        ):
            expected = f"a float32 tensor {list(weight.shape)} on {weight.device} that requires no grad"
            raise ValueError(f"{name}: main_grads must have for {argument} {expected}, got {_describe(main)}")
        if main is not None and memory.folded(main):
            got = f"{list(main.shape)} of strides {list(main.stride())}"
            raise ValueError(f"{name}: main_grads must have for {argument} one place for each element, got {got}")
    written = {f"main_grads for {argument}": main for argument, main in zip(weights, mains) if main is not None}
    read = {argument: value for argument, value in given.items() if value is not None}
    if written and (pair := memory.shared(written, read)):
        raise ValueError(f"{name}: main_grads must have memory of their own, got {' and '.join(pair)} sharing some")
    needing = needing_grad(operands)
    taken = [main if argument in needing else None for argument, main in zip(weights, mains)]
    if any(main is not None for main in taken) and (got := modes.transform_of(operands, True)):
        raise NotImplementedError(f"{name}: main_grads take the gradients of a plain backward pass, got {got}")
    return Mains(*taken) if "w_gate" in operands else Mains(w_gate=taken[0], w_down=taken[1])


def _unwritable(main: Tensor) -> str:
    """What keeps kernels from adding to the memory of ``main``; "" if nothing does."""
    if main.layout is not torch.strided:
        return f"of layout {main.layout}"
    if modes.compiling():
        return ""
    if not is_in_memory(main):
        return "whose memory does not hold its values (a negated view, or zeros without memory)"
    if main.is_inference():
        return "made in inference mode"
    return "that a transform wraps" if torch._is_functional_tensor(main) else ""


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    grad = " that requires grad" if value.requires_grad else ""
    odd = f", {odd}" if (odd := _unwritable(value)) else ""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}{grad}{odd}"
