"""The front of a layer: a call whose kind is known goes from ``forward`` to its launches by one look-up.

A kind of calls is the shape of x and whether gradients will be needed. A call of it that took the
long way leaves what computes y; the next one asks only what no kernel checks: modes, hooks, and types of tensors.
Everything else, such as the layout of a weight that was replaced, is compared by the program (``Executable.ran``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twell import _modes
from twell._plain import HOOKS_OF_ALL, calls_are_torchs
from twell._runtime import nvtx
from twell.strategy.site import AutoStrategy, Bucket

# Kinds of calls that a layer remembers.
_MOST = 64

# of x, w_gate, w_up, w_down and biases as ``Operands`` has them: y, or None, with nothing run, if they lie otherwise
Run = Callable[..., "Tensor | None"]


class _Known(NamedTuple):
    """What computes y of a kind of calls; with a site, while ``bucket`` has this ``version``."""

    run: Run
    dtype: torch.dtype
    device: int
    site: AutoStrategy | None
    bucket: Bucket | None
    version: int


class Front:
    """The known kinds of calls of a layer, by the shape of x and whether gradients will be needed."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.Size, bool], _Known] = {}

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
        self._known[x.shape, training] = _Known(run, x.dtype, x.device.index, site, bucket, version)

    def run(self, layer: Any, x: Tensor) -> Tensor | None:
        """y of a call of a known kind; None, with nothing run, of any other."""
        if not self._known or type(x) is not Tensor or x.is_neg() or x._is_zerotensor():
            return None
        operands: list[Tensor | None] = [x]
        biases: list[Tensor | None] = []
        needing = x.requires_grad
        children = layer._modules
        for name in layer._projections:
            child = children.get(name)
            # calling it must be F.linear with its parameters and nothing else
            if type(child) is not nn.Linear:
                return None
            own = child.__dict__
            if (
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
            ):
                return None
            parameters = own["_parameters"]
            weight, bias = parameters.get("weight"), parameters.get("bias")
            if len(parameters) != 2 or type(weight) is not nn.Parameter or weight.is_neg() or weight._is_zerotensor():
                return None
            if "forward" in own or "weight" in own or "bias" in own:
                return None
            if bias is not None:
                if type(bias) is not nn.Parameter or bias.is_neg() or bias._is_zerotensor():
                    return None
                needing = needing or bias.requires_grad
            needing = needing or weight.requires_grad
            operands.append(weight)
            biases.append(bias)
        training = needing and torch.is_grad_enabled()
        known = self._known.get((x.shape, training))
        if known is None or x.dtype is not known.dtype or x.device.index != known.device or not x.is_cuda:
            return None
        if any(HOOKS_OF_ALL) or not calls_are_torchs() or not _modes.undisturbed() or _modes.profiling() or nvtx.ON:
            return None
        laid = layer._laid
        # a gradient is to be laid out as the weight is without twell
        if (laid.fresh and layer._down_layout == "auto") or (training and laid.weight is not None):
            return None
        if known.device != torch.cuda.current_device() or _modes.capturing(x):
            return None
        if not layer._gated:
            operands.insert(2, None)
            biases.insert(1, None)
        elif len(biases) != 3:
            # one projection for both
            return None
        with laid.lock:
            site, bucket = known.site, known.bucket
            if site is not None and bucket is not None:
                if bucket.version != known.version or not site.heeds(x):
                    return None
                if training and (_modes.checkpointed() or _modes.in_backward()):
                    return None
                if not site.counted(bucket):
                    return None
            if laid.weight is not None:
                laid.note_reading(laid.weight)
            y = known.run(*operands, *biases)
        if y is None:
            self._known.pop((x.shape, training), None)
        return y
