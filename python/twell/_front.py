"""The front of a layer: a call whose kind is known goes from ``forward`` to its launches by one look-up.

A kind of calls is the shape, dtype and device of x and whether gradients will be needed. A call of it that took the
long way leaves what computes y; the next one asks only what no kernel checks: modes, hooks, and types of tensors.
Everything else, such as the layout of a weight that was replaced, is compared by the program (``Executable.ran``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twell import _modes
from twell._plain import run_as_linear
from twell._runtime import nvtx
from twell.strategy.site import AutoStrategy, Bucket

# Kinds of calls that a layer remembers.
_MOST = 64

# of x, w_gate, w_up, w_down and biases as ``Operands`` has them: y, or None, with nothing run, if they lie otherwise
Run = Callable[..., "Tensor | None"]
_Kind = tuple[torch.Size, torch.dtype, torch.device, bool]


class _Known(NamedTuple):
    """What computes y of a kind of calls; with a site, while ``bucket`` has this ``version``."""

    run: Run
    site: AutoStrategy | None
    bucket: Bucket | None
    version: int


class Front:
    """The known kinds of calls of a layer."""

    def __init__(self) -> None:
        self._known: dict[_Kind, _Known] = {}

    def clear(self) -> None:
        """Forget all kinds, since a setting of the layer has changed."""
        self._known.clear()

    def remember(self, x: Tensor, training: bool, run: Run, site: AutoStrategy | None, routed: Any) -> None:
        """Let calls like this one go to ``run``. ``routed`` are the other arguments of ``AutoStrategy.begin``."""
        bucket, version = None, 0
        if site is not None:
            known = site.routes.get((x.shape, *routed))
            if known is None:
                # it measures, or waits for figures
                return
            bucket, version = known[0], known[0].version
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[x.shape, x.dtype, x.device, training] = _Known(run, site, bucket, version)

    def run(self, layer: Any, x: Tensor) -> Tensor | None:
        """y of a call of a known kind; None, with nothing run, of any other."""
        if not self._known or type(x) is not Tensor:
            return None
        names = layer._projections
        children = [layer._modules.get(name) for name in names]
        if len(names) != 2 + layer._gated or not run_as_linear(children):
            return None
        weights, biases = [c._parameters["weight"] for c in children], [c._parameters["bias"] for c in children]
        operands = [operand for operand in (x, *weights, *biases) if operand is not None]
        needing = False
        for operand in operands:
            if (operand is not x and type(operand) is not nn.Parameter) or not _modes.is_in_memory(operand):
                return None
            needing = needing or operand.requires_grad
        training = needing and torch.is_grad_enabled()
        kind = x.shape, x.dtype, x.device, training
        known = self._known.get(kind)
        if known is None or not x.is_cuda or nvtx.ON or not _modes.undisturbed() or _modes.profiling():
            return None
        laid = layer._laid
        # a gradient is to be laid out as the weight is without twell
        if (laid.fresh and layer._down_layout == "auto") or (training and laid.weight is not None):
            return None
        if x.device.index != torch.cuda.current_device() or _modes.capturing(x):
            return None
        if not layer._gated:
            weights.insert(1, None)
            biases.insert(1, None)
        with laid.lock:
            run, site, bucket, version = known
            if site is not None and bucket is not None:
                if bucket.version != version or not site.heeds(x):
                    return None
                if training and (_modes.checkpointed() or _modes.in_backward()):
                    return None
                if not site.counted(bucket):
                    return None
            if laid.weight is not None:
                laid.note_reading(laid.weight)
            y = run(x, *weights, *biases)
        if y is None:
            self._known.pop(kind, None)
        return y
