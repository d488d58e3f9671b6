"""The memory of made calls: from what is cheap to ask of a call, one look-up leads to what computes y.

A call that took the long way leaves a ``Made``. Its key has what no kernel compares: shapes and strides of x and of the
down weight, which operands there are, whether a gradient will be needed, and what is asked. All else that a program
depends on it compares itself (``Executable.ran``). No entry holds a tensor: a write, a moved weight and another layer
of one form need no notice.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from twell.base.activation import Activation
from twell.choose.plan import Route
from twell.choose.site import AutoStrategy, Bucket
from twell.runtime import modes
from twell.runtime.program import kept

# Entries of a site, and of all named strategies together.
_MOST = 512

# Of the first seven of a ``Layer``, or of all if it has scales, w_down [K, N]: y, or None, with nothing run, if they
# lie otherwise.
Run = Callable[..., "Tensor | None"]


class How(NamedTuple):
    """What is asked beside operands. strategy: a name or a site. fast: of e4m3. of: the operator, "" for a function."""

    activation: Activation
    strategy: Any = "auto"
    invariant: Any = False
    compression: Any = 8
    fast: Any = True
    of: str = ""


class Made(NamedTuple):
    """What computes y of a kind of calls; if a site chose it, while ``bucket`` has this ``version``."""

    run: Run
    bucket: Bucket | None
    version: int


@kept
def _named() -> dict[Any, Made]:
    return {}


def _memory(how: How) -> Any:
    """Where calls that ask so are known; None where none is."""
    # True, 1 and 1.0 are one key: what the long way refuses must not be found
    if type(how.invariant) is not bool or type(how.compression) is not int or type(how.fast) is not bool:
        return None
    if type(how.activation.threshold) is not float:
        return None
    if type(how.strategy) is str:
        return _named()
    return how.strategy.made if isinstance(how.strategy, AutoStrategy) else None


def _key(x: Tensor, w_down: Tensor, pattern: int, training: bool, how: How) -> tuple[Any, ...]:
    activation, strategy, *rest = how
    asked = activation, strategy if type(strategy) is str else "", *rest
    return x.shape, x.stride(), x.dtype, x.device.index, w_down.shape, w_down.stride(), pattern, training, asked


def known(operands: Sequence[Any], how: How) -> Tensor | None:
    """y of a call of a kind that was made before; None, with nothing run, of any other."""
    memory = _memory(how)
    if not memory:
        return None
    pattern, needing = 1, False
    for operand in operands:
        pattern += pattern
        if operand is not None:
            kind = type(operand)
            if (kind is not Tensor and kind is not Parameter) or operand.layout is not torch.strided:
                return None
            if operand.is_nested or operand.is_neg() or operand._is_zerotensor():
                return None
            needing = needing or operand.requires_grad
            pattern += 1
    x, training = operands[0], needing and torch.is_grad_enabled()
    if x is None or operands[3] is None or not x.is_cuda:
        return None
    made = memory.get(_key(x, operands[3], pattern, training, how))
    if made is None or not modes.undisturbed() or modes.profiling() or modes.capturing(x):
        return None
    # a recomputation must save what its forward pass saved
    if training and (modes.checkpointed() or modes.in_backward()):
        return None
    if x.device.index != torch.cuda.current_device():
        return None
    bucket = made.bucket
    if bucket is not None:
        site = how.strategy
        if bucket.version != made.version or not site.heeds(x) or not site.counted(bucket):
            return None
    y: Tensor | None = made.run(*operands)
    return y


def note(operands: Sequence[Any], how: How, training: bool, run: Run, route: Route, chosen: bool) -> None:
    """Let calls like this one, which ran by ``route``, go to ``run``. ``chosen``: whether the site chose the route."""
    memory = _memory(how)
    if memory is None or (chosen and route.until is None):
        # it measures, or waits for figures
        return
    pattern = 1
    for operand in operands:
        pattern += pattern + (operand is not None)
    if len(memory) >= _MOST:
        memory.clear()
    made = Made(run, *(route.until if chosen else (None, 0)))
    memory[_key(operands[0], operands[3], pattern, training, how)] = made
