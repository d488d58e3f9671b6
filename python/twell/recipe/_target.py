"""Controllers that steer L1, or L1 and FATReLU's threshold, to a number of non-zeros, without a wait in the step."""

import math
import statistics
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from twell.base.arguments import require_choice, require_integer, require_positive
from twell.nn.compaction import MLP, whole
from twell.recipe import _terms
from twell.recipe._aux import layers, mean_over_layers, mean_over_ranks, with_tokens
from twell.runtime import modes
from twell.runtime.log import logger

# The coefficient is the exponential of a slow part, which sums the error log(non-zeros / goal), and a fast part in
# proportion to it, which damps. Tried with models of 0.1 M parameters and 60 to 1,200 steps: runs to 7 to 25 % of the
# neurons ended within a seventh of the target, those to 4 % up to a third below it.
#
# How far the slow part can move on the way to the target: e^12 is 160,000. It falls to _LEAST of the first coefficient
# at the least, from where it comes back soon, and moves at its full rate from an error of 1 / _SHARPNESS on.
_TRAVEL, _LEAST, _SHARPNESS = 12.0, 1e-3, 3.0
# The fast part per unit of error, and the largest error that it follows.
_DAMPING, _MOST_ERROR = 3.0, 1.0
# The L1 term of the first step and the largest one, in nats, and in how many stages the goal falls over which share of
# the steps.
_BEGIN_TERM, _MOST_TERM = 0.01, 3.0
_STAGES, _REACH = 4, 0.6

# Tokens per call whose gates are computed for their L1.
_GATES = 2048

# The entries of the state: logarithms, NaN before a usable reading, of the coefficient without damping, of its first
# value, of the first and the last number of non-zeros that L1 is steered by, and of the last mean of ``Aux.l0``; the
# coefficient; 1 once the term has been held at its most.
_, _BEGIN, _FIRST, _LAST, _FIRED, _NOW, _HELD = range(7)

# With a threshold, L1 is steered to this many times the target, and the goals of both fall over these shares of the
# steps.
_OPEN, _REACH_OF_GATES, _REACH_OF_THRESHOLD = 2.0, 0.4, 0.5
# The first threshold, over the mean gate above 0. Its logarithm moves by this per step and unit of error, and faster in
# runs of less than 160 steps, so that it gets as far as the way asks.
_START, _RATE, _FASTEST = 0.1, 0.15, 0.5


class TargetSparsity:
    """An L1 term whose coefficient rises in stages until layers have a mean of ``nnz`` non-zeros per token, and holds.

    After ``record_aux(model)``, ``target.term(model)`` goes into each loss in the place of ``l1_term``, and
    ``target.update()`` follows each step of the optimizer.

    Coefficients do not transfer between models, lengths of training and activations; a number of non-zeros does. The
    goal falls from the first non-zeros measured to ``nnz`` in four stages, by equal factors, over three fifths of the
    steps: along a sine in the first half of a stage, and held in its second. After every step the logarithm of the
    coefficient moves by the measured error, log(non-zeros / goal), less and less towards the end of the run, as the
    learning rate does. The first term is of 0.01 nats. At 3 nats the coefficient stops rising, as optimizers scale
    their steps: then the learning rate is too small for the target, or the steps are too few; ``read`` warns once.

    No step waits for the device. If torch.distributed is initialised, all ranks share figures and coefficients and must
    call ``term`` and ``update`` equally often, whichever layers a rank skips and whichever experts it has tokens for.
    Calls whose figures are not finite, or whose L1 is 0 as without tokens or in a model that fires no more, are
    ignored: a step of nothing else leaves all as it is. Padding counts unless ``term`` gets the ``attention_mask``.

    Args:
        nnz: the target, a mean over layers; ``term`` raises ValueError unless it is below their mean number of neurons.
        steps: of the whole run, whose learning rate falls to its end.
        of: "hidden", the L1 of ``l1_term``, or "gate", L1 and non-zeros of the gate after ReLU, whatever FATReLU's
            threshold, of up to 2,048 tokens per call, which needs ``record_aux(model, inputs=True)``. Layers with
            "relu2" and "drelu" need "gate": L1 of their hidden state makes gates small without silencing them, or
            silences the up projection.
    """

    def __init__(self, nnz: float, steps: int, *, of: Literal["hidden", "gate"] = "hidden") -> None:
        require_positive("nnz", nnz)
        require_choice("of", of, ("hidden", "gate"))
        require_integer("steps", steps, 1)
        self.nnz, self.steps, self.reach, self.of = float(nnz), steps, _REACH, of
        self.step = 0
        self._state: Tensor | None = None
        # of the usable terms since the last update: sums of both numbers of non-zeros and of L1, and how many
        self._sum: Tensor | None = None
        self._warned = False

    def term(self, model: nn.Module, *, several: bool = False, attention_mask: Tensor | None = None) -> Tensor:
        """The coefficient times L1, with the arguments and errors of ``l1_term``; reading clears the record.

        Of tokens that ``attention_mask`` leaves out neither L1 nor non-zeros count.
        """
        if self._state is None:
            _require_below_neurons(self.nnz, model)
            for name, layer in layers(model).items():
                if self.of == "hidden" and layer.activation in ("relu2", "drelu"):
                    got = f'"hidden" and {name or "the layer"}; it needs record_aux(model, inputs=True)'
                    raise ValueError(f'of must be "gate" for layers with {layer.activation!r}, got {got}')
        return self.weighed(model, several, attention_mask, "TargetSparsity.term")

    def weighed(self, model: nn.Module, several: bool, mask: Tensor | None, caller: str) -> Tensor:
        """``term`` for any target; errors name ``caller``."""
        _terms.require_mask(mask)
        of_gate = self.of == "gate"
        calls = [call for _, call in _terms.read_aux(model, several, caller, None if of_gate else mask)]
        # experts without tokens fire nothing, and say nothing of the others
        fired = [whole(call.aux.l0) for call in with_tokens(calls, [call.idle for call in calls])]
        if not of_gate:
            counts = fired
            l1 = mean_over_layers(model, [whole(call.aux.l1) for call in calls])
        else:
            inputs = _terms.read_inputs(model, mask)
            gates = [_terms.gates(each, _GATES) for each in inputs]
            idle = [each.numel() == 0 for each in gates]
            counted = with_tokens(gates, idle)
            if mask is not None:
                # the layers' own counts have padding in them
                fired = [_l1(_terms.fires(*each).float()) for each in zip(with_tokens(inputs, idle), counted)]
            counts = [_l1((each.detach() > 0).float()) for each in counted]
            l1 = mean_over_layers(model, list(map(_l1, gates)))
        with torch.no_grad():
            state = self._on(l1)
            kinds = [torch.stack([each.to(l1.device) for each in kind]) for kind in (counts, fired)]
            now = torch.stack([each.mean(dtype=torch.float64) for each in kinds])
            figures = torch.cat([now, l1.detach().double()[None], now.new_ones(1)])
            figures = torch.where(figures.isfinite().all() & (figures[2] > 0), figures, 0)
            self._sum = figures if self._sum is None else self._sum + figures
        # a copy: ``update`` writes the state before a late backward pass may read it
        return l1 * state[_NOW].to(l1.dtype, copy=True)

    @torch.no_grad()
    def update(self) -> Tensor:
        """Steer by the terms since the last update: call it once per step of the optimizer.

        Returns whether any of them was usable, a 0-d tensor.
        """
        if self._state is None or self._sum is None:
            raise RuntimeError("TargetSparsity: update needs a term since the last update, got none")
        slow, begin, first, _, _, _, held = self._state.unbind()
        figures = mean_over_ranks(self._sum)
        usable, means = figures[3] > 0, figures[:3] / figures[3]
        last, fired = means[:2].clamp(min=1e-3).log()
        l1 = means[2].log()
        # the first terms may have been unusable
        begin, slow = (torch.where(each.isnan(), math.log(_BEGIN_TERM) - l1, each) for each in (begin, slow))
        first = torch.where(first.isnan(), last, first)
        top = first.clamp(min=math.log(self.nnz))
        goal = top + self.progress(self.step) * (math.log(self.nnz) - top)
        error = (last - goal).clamp(-_MOST_ERROR, _MOST_ERROR)
        way = max(1.0, self.reach * self.steps)
        # behind the way it falls to 0
        left = min(1.0, max(0.0, (self.steps - self.step) / max(1.0, self.steps - way)))
        moved = slow + _TRAVEL / way * left * (error * _SHARPNESS).clamp(-1, 1)
        moved = torch.maximum(moved, begin + math.log(_LEAST))
        # where the term is at its most, the slow part does not sum what has no effect
        most = math.log(_MOST_TERM) - l1
        full = moved + _DAMPING * error > most
        slow = torch.where(full, torch.minimum(moved, slow), moved)
        now = torch.minimum(slow + _DAMPING * error, most).exp()
        state = torch.stack([slow, begin, first, last, fired, now, torch.maximum(held, full)])
        self._state = torch.where(usable, state, self._state)
        self.step += 1
        self._sum = None
        return usable

    def progress(self, step: int) -> float:
        """How far the goal is in ``step``, from 0, the first non-zeros, to 1, the target, in logarithms."""
        stage, within = divmod(min(1.0, step / (self.reach * self.steps)) * _STAGES, 1)
        return min(1.0, (stage + math.sin(math.pi / 2 * min(1.0, 2 * within)) ** 2) / _STAGES)

    def read(self) -> dict[str, float]:
        """The coefficient now and the non-zeros of the last step; NaN before there are any. Waits for the device.

        Warns once if the term has come to its most: the learning rate is too small, or the steps are too few.
        """
        if self._state is None:
            return {"coefficient": math.nan, "non_zeros": math.nan}
        values = self._state.tolist()
        if values[_HELD] and not self._warned:
            self._warned = True
            logger.warning(
                "the L1 term has come to %g nats, and its coefficient rises no further: the learning rate is too small "
                "for this target, or the steps too few, and non-zeros may stay above it; a larger learning rate or "
                "more steps help",
                _MOST_TERM,
            )
        return {"coefficient": values[_NOW], "non_zeros": math.exp(values[_LAST])}

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` needs to go on after a whole step, and the arguments that must be the same there.

        It has words, numbers and lists of these alone. Waits for the device.
        """
        held = None if self._state is None else self._state.tolist()
        target = {"nnz": self.nnz, "steps": self.steps, "l1_of": self.of}
        return {"of": "TargetSparsity", **target, "step": self.step, "state": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; terms since the last update are forgotten. ValueError if it is of another target."""
        _require_state(state, self.state_dict())
        self.step, self._state, self._sum = int(state["step"]), _tensor(state["state"]), None

    def _on(self, l1: Tensor) -> Tensor:
        """The state on the device of ``l1``, made of it if this is the first step."""
        if self._state is None:
            begin = (_BEGIN_TERM / mean_over_ranks(l1.detach().double())).log()
            nothing = torch.full_like(begin, math.nan)
            begin = torch.where(begin.isfinite(), begin, nothing)
            now = begin.exp().nan_to_num(0)
            self._state = torch.stack([begin, begin, nothing, nothing, nothing, now, torch.zeros_like(now)])
        elif self._state.device != l1.device:
            self._state = self._state.to(l1.device, non_blocking=True)
        return self._state


def _l1(gates: Tensor) -> Any:
    """The mean over tokens of the L1 norm of gates [T, N]."""
    return gates.sum(-1).sum() / max(1, len(gates))


def _require_below_neurons(nnz: float, model: nn.Module) -> None:
    neurons = statistics.fmean(layer.intermediate for layer in layers(model).values())
    if nnz >= neurons:
        raise ValueError(f"nnz must be below {neurons:g}, the neurons of a layer (their mean over layers), got {nnz:g}")


def _require_state(state: Any, own: dict[str, Any]) -> None:
    """ValueError unless ``state`` has the keys of ``own`` and is of the same kind and target."""
    if not isinstance(state, dict) or "of" not in state:
        got = f"the keys {', '.join(map(str, state)) or 'none'}" if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"state must be what {own['of']}.state_dict returned, got {got}")
    for name in ("of", "nnz", "steps", "l1_of"):
        if state.get(name) != own[name]:
            raise ValueError(f"state must have {name} {own[name]}, got {state.get(name)}")
    if state.keys() != own.keys():
        raise ValueError(f"state must have {', '.join(own)}, got {', '.join(state)}")


def _tensor(numbers: list[float] | None) -> Tensor | None:
    return None if numbers is None else torch.tensor(numbers, dtype=torch.float64, device="cpu")


class TargetThreshold:
    """FATReLU with one threshold for all layers, which training moves until ``nnz`` neurons fire per token.

    Used as ``TargetSparsity``, after ``record_aux(model, inputs=True)`` and with ``settle()`` at the end. L1 of the
    gate, a ``TargetSparsity``, leaves twice the target's gates above 0, and the threshold silences the smaller half of
    them. After each step the logarithm of the threshold moves by the measured error, log(non-zeros / goal), where the
    goal falls from the first non-zeros measured to ``nnz`` by equal factors over the first half of the steps.

    The layers must have "relu" or "fatrelu", and get "fatrelu" and a threshold that is a tensor: no step waits for the
    device, no graph is traced again, and the layers run dense. ``settle`` makes a number of it, with which they may
    run sparse. The threshold begins as that of the layers, which must have one in common, and with "relu" at 0. All
    ranks must call ``term`` and ``update`` equally often. Calls that ``TargetSparsity`` ignores move nothing.

    A copy of the model keeps a threshold of its own, which does not move. ``save_pretrained`` of a ``PreTrainedModel``
    writes "fatrelu" and the threshold of that step, here and after ``settle``.

    Args:
        model: on its device, not compiled yet.
        nnz: the target, the mean over layers of ``Aux.l0``, below the mean of their neurons.
        steps: of the whole run, whose learning rate falls to its end.

    Raises ValueError for layers with another activation, with different thresholds or with one that moves already, as
    by another ``TargetThreshold`` before its ``settle``, and for another target.
    """

    def __init__(self, model: nn.Module, nnz: float, steps: int) -> None:
        require_positive("nnz", nnz)
        self.gates = TargetSparsity(_OPEN * nnz, steps, of="gate")
        self.gates.reach = _REACH_OF_GATES
        self.nnz = float(nnz)
        self._model, found = model, layers(model)
        self._begin, self._layers = _threshold_of(found), list(found.values())
        _require_below_neurons(self.nnz, model)
        devices = {layer.down_proj.weight.device for layer in self._layers}
        self._levels = {device: torch.full((), self._begin, dtype=torch.float32, device=device) for device in devices}
        # logarithms of the threshold, of the least one, and of the first number of non-zeros
        self._state: Tensor | None = None
        self._settled = False
        for layer in self._layers:
            layer.threshold, layer.activation = 0, "fatrelu"
            layer.threshold = self._levels[layer.down_proj.weight.device]

    def term(self, model: nn.Module, *, several: bool = False, attention_mask: Tensor | None = None) -> Tensor:
        """The coefficient times L1 of the gate, as ``TargetSparsity.term``; reading clears the record.

        RuntimeError if the layers of ``model`` are others than those that it gave its threshold, or have lost it.
        """
        self._require_own("term", layers(model).values())
        # twice the target may be more than all neurons
        return self.gates.weighed(model, several, attention_mask, "TargetThreshold.term")

    @torch.no_grad()
    def update(self) -> None:
        """Steer by the terms since the last update: call it once per step of the optimizer."""
        usable = self.gates.update()
        gates, step = self.gates._state, self.gates.step
        assert gates is not None
        # the mean of the gates above 0: their L1 by their number
        mean = math.log(_BEGIN_TERM) - gates[_BEGIN] - gates[_FIRST]
        begin = mean + math.log(_START)
        least = begin + math.log(_LEAST)
        if self._begin:
            begin = torch.full_like(begin, math.log(self._begin))
            least = torch.minimum(least, begin)
        state = torch.stack([begin, least, gates[_FIRED].clamp(min=math.log(self.nnz))])
        if self._state is not None:
            # NaN until there is a usable reading; one that was loaded may be on the CPU
            before = self._state.to(state.device)
            state = torch.where(before.isnan(), state, before)
        level, least, first = state
        way = _REACH_OF_THRESHOLD * self.gates.steps
        passed = min(1.0, step / way)
        error = gates[_FIRED] - (first + passed * (math.log(self.nnz) - first))
        rate = min(_FASTEST, max(_RATE, _TRAVEL / way))
        moved = level + rate * error.clamp(-_MOST_ERROR, _MOST_ERROR)
        moved = torch.maximum(moved, least)
        self._state = torch.stack([torch.where(usable, moved, level), least, first])
        self._write()

    def read(self) -> dict[str, float]:
        """The coefficient and the threshold now and the non-zeros of the last step, as ``TargetSparsity.read``."""
        found = self.gates.read()
        if self._state is not None and self.gates._state is not None:
            found["non_zeros"] = math.exp(self.gates._state[_FIRED])
        return found | {"threshold": float(next(iter(self._levels.values())))}

    def settle(self) -> float:
        """Give the layers the threshold as a number, which they keep, and return it. Waits for the device.

        ``save_pretrained`` of an adapter and a ``state_dict`` lack it: keep it with those. RuntimeError as ``term``.
        """
        self._require_own("settle", layers(self._model).values())
        threshold = self.read()["threshold"]
        for layer in self._layers:
            layer.threshold = threshold
        self._settled = True
        return threshold

    def state_dict(self) -> dict[str, Any]:
        """As ``TargetSparsity.state_dict``."""
        held = None if self._state is None else self._state.tolist()
        return {**self.gates.state_dict(), "of": "TargetThreshold", "nnz": self.nnz, "threshold": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; terms since the last update are forgotten. ValueError if it is of another target."""
        _require_state(state, self.state_dict())
        own = self.gates.state_dict()
        self.gates.load_state_dict({name: state[name] for name in own} | {"of": own["of"], "nnz": own["nnz"]})
        self._state = _tensor(state["threshold"])
        self._write()

    def _require_own(self, caller: str, found: Iterable[MLP]) -> None:
        """RuntimeError unless the threshold of all these layers is the one that moves, before ``settle``."""
        if self._settled or modes.compiling():
            return
        if any(all(layer.threshold is not level for level in self._levels.values()) for layer in found):
            raise RuntimeError(
                f"TargetThreshold.{caller}: the layers must have the threshold that it gave them, got others: "
                "twell.compact and copies make new layers, and a threshold that was set replaces it. Make a "
                "TargetThreshold for the layers that train, or set their threshold to the number that read() returns"
            )

    def _write(self) -> None:
        """Give the layers the threshold of the state."""
        log = torch.full((), math.nan, dtype=torch.float32, device="cpu") if self._state is None else self._state[0]
        for level in self._levels.values():
            level.copy_(torch.where(log.isnan(), self._begin, log.exp()), non_blocking=True)


def _threshold_of(found: dict[str, MLP]) -> float:
    """The threshold of the layers; ValueError unless they may have one and have the same, a number."""
    for name, layer in found.items():
        if layer.activation not in ("relu", "fatrelu"):
            raise ValueError(f'{name or "the model"} must have "relu" or "fatrelu", got {layer.activation!r}')
        if isinstance(layer.threshold, Tensor):
            got = "a tensor, as of a TargetThreshold that moves it: settle() ends that one"
            raise ValueError(f"the threshold of the layers must be a number, got {got}")
    values = [float(layer.threshold) for layer in found.values()]
    if min(values) != max(values):
        got = f"{min(values):g} to {max(values):g}; set them to one number before"
        raise ValueError(f"the layers must have one threshold in common, where it begins, got {got}")
    return values[0]
