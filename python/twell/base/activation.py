"""The ReLU family: the activation of a layer, its checks, and its formulas by torch's operators."""

import functools
import math
import struct
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.base.arguments import require_choice, require_number
from twell.runtime import geometry, modes

ActivationName = Literal["relu", "relu2", "drelu", "fatrelu"]

NAMES = tuple(geometry.ACTIVATIONS)
# ReLU of the k largest gates of each token, where k stands for the threshold
TOP_K = "topk"
# of the largest gates of all tokens together
BATCH_TOP_K = "batchtopk"
NAMES_OF_FAMILY = {"relu": "ReLU", "relu2": "squared ReLU", "drelu": "dReLU", "fatrelu": "FATReLU"}


class Activation(NamedTuple):
    """How a layer makes its hidden state h of the gate g and the up projection u, which is 1 in a layer without a gate.

    ==========  ==============================================
    "relu"      h = relu(g) u
    "relu2"     h = relu(g)^2 u
    "drelu"     h = relu(g) relu(u), in a layer with a gate
    "fatrelu"   h = g u where g > ``threshold``, else 0
    ==========  ==============================================

    And "topk", in a layer without a gate: relu(g) of each token's ``threshold`` largest gates, of equal ones the first.

    A threshold may be a number, one for each neuron, as a tensor [N], or a 0-d tensor.

    What is stored and counted is relu(g), for fatrelu g above its threshold: the gate *after* it in the methods below.
    A NaN gate stays NaN. Results have the dtype of the operands: each is computed in fp32, or wider, and rounded once.

    One that is a 0-d tensor may change between calls without a wait or another graph; kernels do not read it.
    It must be 0 or more and finite in the dtype of the gate. Eager calls check one on the CPU. A look at another would
    be a wait: there, and in graphs, a negative one is 0, by one that is NaN every gate passes, and by an infinite one
    none.
    """

    name: str = "relu"
    threshold: Any = 0.0

    @property
    def moves(self) -> bool:
        """Whether the threshold is a 0-d tensor."""
        return isinstance(self.threshold, Tensor) and self.threshold.dim() == 0

    @property
    def by_neuron(self) -> bool:
        """Whether each neuron has a threshold of its own."""
        return isinstance(self.threshold, Tensor) and self.threshold.dim() == 1

    def code(self) -> int:
        return geometry.ACTIVATIONS["relu" if self.name == TOP_K else self.name]

    @property
    def k(self) -> int:
        """How many gates of a token are kept; 0 for all."""
        return int(self.threshold) if self.name == TOP_K else 0

    def level(self, dtype: torch.dtype) -> Any:
        """The threshold rounded to ``dtype``; ValueError if it is infinite there, of tensors where ``_is_seen``."""
        if isinstance(self.threshold, Tensor):
            return _level_of(self.threshold, dtype)
        if self.name == TOP_K:
            return 0.0
        return _rounded(self.threshold, dtype) if self.threshold else 0.0

    def after(self, gate: Tensor, inplace: bool = False) -> Tensor:
        """The gate after it; in the memory of ``gate`` if ``inplace``."""
        if isinstance(self.threshold, Tensor):
            return torch.where(gate <= self.level(gate.dtype), 0, gate)
        if self.name == TOP_K:
            return largest_of_each(gate.relu(), self.k)
        if self.threshold:
            return F.threshold(gate, self.level(gate.dtype), 0.0, inplace)
        return F.relu(gate, inplace)

    def hidden(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """h of the gate after it."""
        if self.name != "relu2":
            return gate if up is None else gate * (up.relu() if self.name == "drelu" else up)
        if up is None:
            # `square` is one of the operators that autocast runs in fp32
            return gate * gate
        wide = torch.promote_types(gate.dtype, torch.float32)
        own = gate.to(wide)
        return (own * own * up.to(wide)).to(gate.dtype)

    def gradients(self, dh: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """d_gate and d_up of the gate after it; d_gate is right where that is not zero."""
        if self.name == "relu2":
            wide = torch.promote_types(gate.dtype, torch.float32)
            upstream, own = dh.to(wide), gate.to(wide)
            d_gate = upstream * (2 * own)
            if up is None:
                return d_gate.to(gate.dtype), None
            return (d_gate * up.to(wide)).to(gate.dtype), (upstream * (own * own)).to(gate.dtype)
        if up is None:
            return dh, None
        if self.name == "drelu":
            return dh * up.relu(), torch.where(up <= 0, 0, dh * gate)
        return dh * up, dh * gate

    def options(self) -> dict[str, Any]:
        """The keyword arguments of functions and modules that mean it."""
        return {"activation": self.name, "threshold": self.threshold}


RELU = Activation()


def largest_of_each(values: Tensor, k: int) -> Tensor:
    """``values`` where they are among the k largest of their row, of equal ones the first, else 0."""
    chosen = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(values).scatter(-1, chosen, values.gather(-1, chosen))


def _is_seen(threshold: Tensor) -> bool:
    """Whether a threshold is on the CPU and in no graph, so that its value may be read."""
    if modes.compiling() or threshold.device.type != "cpu" or type(threshold) is not Tensor:
        return False
    return not (modes.dispatched() or modes.transformed())


def _require_value(threshold: Tensor) -> None:
    if _is_seen(threshold):
        odd = threshold.detach()[~((threshold >= 0) & (threshold < math.inf))]
        if odd.numel():
            raise ValueError(f"threshold must be a finite number of at least 0, got a tensor of {float(odd[0])}")


def _level_of(threshold: Tensor, dtype: torch.dtype) -> Tensor:
    """A threshold that moves, rounded to ``dtype``."""
    level = threshold.clamp(min=0).to(dtype)
    if dtype.itemsize == 2 and modes.compiling():
        # compilers that compute in fp32 leave out a rounding, but not an operation on its bits
        return level.view(torch.int16).clamp(min=0).view(dtype)
    if _is_seen(threshold) and bool(level.isinf().any()):
        raise ValueError(f"threshold must be finite in {dtype}, got a tensor of {float(threshold.max())}")
    return level


def activation_of(
    name: Any, threshold: Any = 0, gated: bool = True, by_neuron: bool = False, top_k: bool = False
) -> Activation:
    """The activation of a layer; with ``by_neuron`` a threshold may be [N], with ``top_k`` "topk" is one, too."""
    if top_k and name == TOP_K:
        if gated:
            raise ValueError('activation "topk" must be of a layer without a gate, got a gate')
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or threshold < 1 or threshold % 1:
            raise ValueError(f'k must be a whole number of at least 1 with activation "topk", got {threshold!r}')
        return Activation(TOP_K, float(threshold))
    if isinstance(threshold, Tensor):
        of_kind = threshold.dim() <= by_neuron and threshold.is_floating_point() and not threshold.requires_grad
        if name != "fatrelu" or not of_kind:
            grad = " that requires grad" if threshold.requires_grad else ""
            shapes = "0-d or [N], floating" if by_neuron else "0-d floating"
            raise ValueError(
                f'threshold must be a number, or with "fatrelu" a {shapes} tensor without gradient, got '
                f"{threshold.dtype} {list(threshold.shape)}{grad} with {name!r}"
            )
        _require_value(threshold)
        return Activation(name, threshold)
    if modes.compiling():
        # a graph is for one threshold, but torch.compile may make an input of a float that is not a literal, defaults
        # and attributes included: then it traces once more. Hence 0 is the functions' default, not 0.0
        # here, as it loads sympy, which takes half as long as all of torch
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        threshold = guard_scalar(threshold)
    if name == "relu" and type(threshold) in (int, float) and threshold == 0:
        return Activation("relu", 0.0)
    require_choice("activation", name, NAMES)
    require_number("threshold", threshold, 0)
    if name == "drelu" and not gated:
        raise ValueError('activation "drelu" must have a gate and an up projection, got a layer without a gate')
    if threshold and name != "fatrelu":
        raise ValueError(f'threshold must be 0 unless activation is "fatrelu", got {threshold} with {name!r}')
    return Activation(name, float(threshold))


# significant bits, and the exponent of the smallest normal number as math.frexp gives it
_FORMATS = {torch.float64: (53, -1021), torch.float32: (24, -125), torch.bfloat16: (8, -125), torch.float16: (11, -13)}


def _rounded(value: float, dtype: torch.dtype) -> float:
    """A positive number rounded to nearest, through float32 as torch converts it; a compiler can trace it."""
    result = value
    for step in (torch.float32, dtype) if dtype.itemsize == 2 else (dtype,):
        bits, least = _FORMATS[step]
        unit = math.ldexp(1.0, max(math.frexp(result)[1], least) - bits)
        result = round(result / unit) * unit
    if result > torch.finfo(dtype).max:
        raise ValueError(f"threshold must be finite in {dtype}, got {value}")
    return result


@functools.lru_cache(4096)
def threshold_pair(activation: Activation, dtype: torch.dtype) -> int:
    """The bits of the threshold in a 16-bit ``dtype`` twice, as kernels take it."""
    level = activation.level(dtype)
    if dtype == torch.float16:
        (bits,) = struct.unpack("<H", struct.pack("<e", level))
    else:
        (bits,) = struct.unpack("<I", struct.pack("<f", level))
        bits >>= 16
    return int(bits) * 0x10001
