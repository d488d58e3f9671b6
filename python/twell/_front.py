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
from twell.ops.operands import Operands
from twell.strategy.plan import Route
from twell.strategy.site import AutoStrategy, Bucket

# Kinds of calls that a layer remembers.
_MOST = 64

# of x, w_gate, w_up, w_down and biases as ``Operands`` has them: y, or None, with nothing run, if they lie otherwise
Run = Callable[..., "Tensor | None"]


class _Known(NamedTuple):
    """What computes y of a kind of calls; with a site, while ``bucket`` has this ``version``.

    children: how many modules the layer has; one that was set beside a projection may take its role.
    """

    run: Run
    dtype: torch.dtype
    device: int
    children: int
    site: AutoStrategy | None
    bucket: Bucket | None
    version: int


# by the shape of x, whether gradients will be needed, and which biases there are
Memory = dict[tuple[torch.Size, bool, int], _Known]


class Front:
    """The known kinds of calls of a layer."""

    def __init__(self) -> None:
        # a call that began before it was cleared leaves what it found in the memory of then
        self.memory: Memory = {}

    def clear(self) -> None:
        """Forget all kinds, behind a change of a setting of the layer."""
        self.memory = {}

    def run(self, layer: Any, x: Tensor) -> Tensor | None:
        """y of a call of a known kind; None, with nothing run, of any other."""
        memory = self.memory
        if not memory or type(x) is not Tensor or x.is_nested or x.layout is not torch.strided:
            return None
        if not _modes.is_in_memory(x):
            return None
        operands: list[Tensor | None] = [x]
        biases: list[Tensor | None] = []
        needing, pattern = x.requires_grad, 1
        children = layer._modules
        for name in layer._projections:
            child = children.get(name)
            # calling it must be F.linear with its parameters and nothing else
            if type(child) is not nn.Linear:
                return None
            own = child.__dict__
            if own["_forward_hooks"] or own["_forward_pre_hooks"]:
                return None
            if own["_backward_hooks"] or own["_backward_pre_hooks"]:
                return None
            parameters = own["_parameters"]
            weight, bias = parameters.get("weight"), parameters.get("bias")
            if len(parameters) != 2 or type(weight) is not nn.Parameter or not weight.is_cuda:
                return None
            if weight.layout is not torch.strided or not _modes.is_in_memory(weight):
                return None
            if "forward" in own or "weight" in own or "bias" in own:
                return None
            pattern *= 2
            if bias is not None:
                if type(bias) is not nn.Parameter or not _modes.is_in_memory(bias):
                    return None
                needing = needing or bias.requires_grad
                pattern += 1
            needing = needing or weight.requires_grad
            operands.append(weight)
            biases.append(bias)
        training = needing and torch.is_grad_enabled()
        kind = x.shape, training, pattern
        known = memory.get(kind)
        if known is None or x.dtype is not known.dtype or x.device.index != known.device or not x.is_cuda:
            return None
        if any(HOOKS_OF_ALL) or not calls_are_torchs() or not _modes.undisturbed() or _modes.profiling() or nvtx.ON:
            return None
        laid, alone = layer._laid, layer._down_layout == "auto"
        # a gradient is to be laid out as the weight is without twell
        if (alone and laid.fresh) or (training and laid.weight is not None) or len(children) != known.children:
            return None
        if known.device != torch.cuda.current_device() or _modes.capturing(x):
            return None
        # a recomputation must save what its forward pass saved
        if training and (_modes.checkpointed() or _modes.in_backward()):
            return None
        if not layer._gated:
            operands.insert(2, None)
            biases.insert(1, None)
        with laid.lock:
            site, bucket = known.site, known.bucket
            if site is not None and bucket is not None:
                if bucket.version != known.version or not site.heeds(x) or not site.counted(bucket):
                    return None
            if alone:
                laid.note_reading(operands[3])
            y = known.run(*operands, *biases)
        if y is None:
            memory.pop(kind, None)
            if site is not None and bucket is not None:
                # the long way counts it
                site.uncount(bucket)
        return y


class Learning(NamedTuple):
    """Where a call that takes the long way leaves what it found: the memory of when it began."""

    memory: Memory
    children: int

    def note(
        self, layer: Operands, training: bool, run: Run, site: AutoStrategy | None, route: Route, copied: bool
    ) -> None:
        """Let calls like this one, which ran by ``route``, go to ``run``."""
        x, bucket, version = layer.x, None, 0
        if site is not None:
            kind = x.shape, len(layer.w_gate), layer.w_up is not None, training, copied, False
            known = site.routes.get(kind)
            if known is None:
                # it measures, or waits for figures
                return
            bucket, version = known[0], known[0].version
            # another thread may have decided meanwhile
            if known[1] is not route or site.routes.get(kind) is not known:
                return
        pattern = 1
        for bias in (
            (layer.b_gate, layer.b_up, layer.b_down) if layer.w_up is not None else (layer.b_gate, layer.b_down)
        ):
            pattern = 2 * pattern + (bias is not None)
        if len(self.memory) >= _MOST:
            self.memory.clear()
        known_now = _Known(run, x.dtype, x.device.index, self.children, site, bucket, version)
        self.memory[x.shape, training, pattern] = known_now
