"""The front of a layer: a call whose kind is known goes from ``forward`` to its launches by one look-up.

A kind of calls is the shape, dtype and device of x, whether gradients will be needed, which biases there are, and how
many modules the layer has: one that was set beside a projection may take its role. The front asks modes, hooks, and
types of tensors, which no kernel checks; see ``strategy/known.py``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twell import _modes
from twell._plain import HOOKS_OF_ALL, calls_are_torchs
from twell._runtime import nvtx
from twell.ops.operands import Operands
from twell.strategy.known import Memory, Run, remember
from twell.strategy.plan import Route
from twell.strategy.site import AutoStrategy


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
        device = x.device.index
        kind = x.shape, x.dtype, device, training, pattern, len(children)
        known = memory.get(kind)
        if known is None or not x.is_cuda:
            return None
        if any(HOOKS_OF_ALL) or not calls_are_torchs() or not _modes.undisturbed() or _modes.profiling() or nvtx.ON:
            return None
        laid, alone = layer._laid, layer._down_layout == "auto"
        # a gradient is to be laid out as the weight is without twell
        if (alone and laid.fresh) or (training and laid.weight is not None):
            return None
        if device != torch.cuda.current_device() or _modes.capturing(x):
            return None
        # a recomputation must save what its forward pass saved
        if training and (_modes.checkpointed() or _modes.in_backward()):
            return None
        if not layer._gated:
            operands.insert(2, None)
            biases.insert(1, None)
        with laid.lock:
            if not known.begins(x):
                return None
            if alone:
                laid.note_reading(operands[3])
            y = known.run(*operands, *biases)
        if y is None:
            memory.pop(kind, None)
            known.undo()
        return y


class Learning(NamedTuple):
    """Where a call that takes the long way leaves what it found: the memory of when it began."""

    memory: Memory
    children: int

    def note(
        self,
        layer: Operands,
        training: bool,
        run: Run,
        site: AutoStrategy | None,
        route: Route,
        copied: bool,
        one_pass: bool,
    ) -> None:
        """Let calls like this one, which ran by ``route``, go to ``run``."""
        x, gated, pattern = layer.x, layer.w_up is not None, 1
        for bias in (layer.b_gate, layer.b_up, layer.b_down) if gated else (layer.b_gate, layer.b_down):
            pattern = 2 * pattern + (bias is not None)
        kind = x.shape, x.dtype, x.device.index, training, pattern, self.children
        remember(
            self.memory, kind, run, route, site, (x.shape, len(layer.w_gate), gated, training, copied, False, one_pass)
        )
