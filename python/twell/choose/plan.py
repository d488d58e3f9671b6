"""How a call runs, as far as nothing is measured: ``plan`` decides it from ``Facts`` alone, and nothing else does.

Functions, the operator ``ffn``, ``explain``, ``analyze`` and the constructors of layers ask it. A route to "auto"
leaves the choice to costs, with figures that an ``AutoStrategy`` measured or without any (``twell.choose.rates``).
"""

from typing import Any, NamedTuple

import torch

from twell.base.arguments import require_flag
from twell.choose.rates import SCREENED
from twell.runtime import geometry, specs

STRATEGIES = ("auto", "dense", "row", "union")
_SCREENING = ("auto", "union")

# dtypes that TwELL stores, and wider ones that run dense on the CPU
PACKED_DTYPES = (torch.bfloat16, torch.float16)
_WIDE_DTYPES = (torch.float32, torch.float64)
_DENSE_TAKES_IT = '; strategy="dense" takes it'


class Facts(NamedTuple):
    """What is known of a call. The defaults are those of inference on plain 16-bit tensors, which nothing limits.

    name: what errors speak of. strategy, invariant, compression: what was asked for, as it was given; "auto" for an
    ``AutoStrategy``, which is the ``site``. screen: whether "union" screens, or "auto" may. n, k: sizes of the layer;
    None where they are known to fit. dtype, device: the dtype of the operands, after autocast, and the type
    of their device. imposed: why "auto" is dense on this device (``cards.imposed``). training: whether a gradient will
    be needed. needing: the operands that require it. moving: whether the threshold is a tensor. called: whether the
    layer must call its projections, since one is more than a weight and a bias. transformed, overridden: what asks for
    a transform, or overrides PyTorch's operators, in words. onnx, exporting, tracing: whether the call is traced for
    ONNX, for ``torch.export``, or at all. float8: whether weights are e4m3 with scales. sliced: whether a layer of more
    neurons than a packed index names may run as slices.
    """

    name: str = "twell"
    strategy: Any = "auto"
    invariant: Any = False
    site: bool = False
    screen: bool = False
    n: Any = None
    k: Any = None
    compression: Any = 8
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    imposed: str = ""
    training: bool = False
    needing: tuple[str, ...] = ()
    moving: bool = False
    called: bool = False
    transformed: str = ""
    overridden: str = ""
    onnx: bool = False
    exporting: bool = False
    tracing: bool = False
    float8: bool = False
    sliced: bool = False


class Route(NamedTuple):
    """How a call runs: its strategy, the ``Measurement`` to fill and the site whose ``hold`` must get y, if any.

    held: non-zeros per token for which training keeps room; 0: the most. screen: whether "union" computes a gate only
    where the int8 screen says that it may fire, or "auto" may choose so. invariant: whether "row" gives a token the
    same bits in every call. reason: why, for ``explain``. until: the bucket of the site that chose it for calls like
    this one, and the version until which that holds.
    """

    strategy: str
    measurement: Any = None
    holder: Any = None
    held: int = 0
    screen: bool = False
    invariant: bool = False
    reason: str = ""
    until: Any = None

    @property
    def name(self) -> str:
        """The route in a word, as figures and profiles show it; without what "auto" may choose."""
        if self.invariant:
            return f"{self.strategy}+invariant"
        return SCREENED if self.screen and self.strategy == "union" else self.strategy


def route_of(name: str, measurement: Any = None, holder: Any = None, held: int = 0) -> Route:
    """The route of this ``Route.name``, which is what ``rates.decide`` chooses."""
    strategy, _, how = name.partition("+")
    return Route(strategy, measurement, holder, held, how == "screen", how == "invariant")


class Refusal(NamedTuple):
    """A call that cannot run: the class and text of the error that it raises, and what ``explain`` says of it."""

    kind: type[Exception]
    message: str
    shown: str
    strategy: str = "none"


def routed(facts: Facts) -> Route:
    """The route of a call; raises what a refusal says."""
    answer = plan(facts)
    if isinstance(answer, Refusal):
        raise answer.kind(answer.message)
    return answer


def plan(facts: Facts) -> Route | Refusal:
    """The route of a call with these facts, "auto" where costs decide, or why there is none. A pure function."""
    asked, invariant = facts.strategy, facts.invariant
    if refusal := _misnamed(facts):
        return refusal
    if invariant:
        # it alone gives the same bits
        asked = "row"
    if facts.called or facts.moving:
        return _beyond_kernels(facts)
    if asked == "dense":
        return Route("dense", reason="it was named")
    if facts.n is not None and (refusal := unpackable(facts)):
        return refusal
    if facts.transformed or facts.onnx or (facts.exporting and facts.training):
        return _without_kernels(facts, asked)
    if facts.overridden:
        if invariant:
            what = f"expected PyTorch's own operators with invariant=True, got {facts.overridden}"
            return _refusal(NotImplementedError, facts, what)
        return Route("dense", reason=facts.overridden)
    packed = facts.dtype in PACKED_DTYPES
    if not packed and (facts.dtype not in _WIDE_DTYPES or facts.device != "cpu"):
        what = "dtype must be bfloat16 or float16 (float32 and float64 on the CPU, float32 under autocast)"
        got = f'{facts.dtype} on {facts.device}; strategy="dense" takes what F.linear takes there'
        return _refusal(TypeError, facts, f"{what}, got {got}")
    if invariant and facts.training:
        what = "invariant=True computes inference alone"
        more = "got grad mode and operands that require grad; call it under torch.no_grad(), or train without it"
        return Refusal(NotImplementedError, f"{what}, {more}", f"calls raise: {what}")
    if asked == "auto" and facts.imposed:
        return Route("dense", reason=facts.imposed)
    if not packed:
        return Route("dense", reason="values wider than 16 bits run dense")
    if asked == "auto" and facts.training and facts.tracing and not facts.site:
        return Route("union", reason="a graph that trains keeps one strategy, and nothing is known of its sparsity")
    if asked == "row" and facts.training:
        return Route("union", reason='training is the same by "row" and by "union"')
    reason = "invariant=True" if invariant else "" if asked == "auto" else "it was named"
    return Route(asked, screen=facts.screen, invariant=invariant, reason=reason)


def unpackable(facts: Facts, instead: str = _DENSE_TAKES_IT) -> Refusal | None:
    """Why the sparse kernels do not take these sizes or this device; messages about sizes end with ``instead``."""
    sizes = (
        ("K", facts.k, specs.K_CLASSES[-1], 16 if facts.float8 else 8),
        ("N", facts.n, geometry.MOST_NEURONS if facts.sliced else geometry.MAX_NEURONS, 8),
    )
    for letter, size, limit, multiple in sizes:
        if size == 0 or size % multiple:
            what = f"{letter} must be a positive multiple of {multiple} for the sparse kernels, got {size}{instead}"
            return _refusal(ValueError, facts, what)
        if size > limit:
            what = f"{letter} must be at most {limit} for the sparse kernels, got {size}{instead}"
            return _refusal(NotImplementedError, facts, what)
    if facts.device not in ("cpu", "cuda", "meta"):
        return _refusal(NotImplementedError, facts, f"the sparse path runs on cuda and cpu, got {facts.device}")
    return None


def _refusal(kind: type[Exception], facts: Facts, what: str) -> Refusal:
    return Refusal(kind, f"{facts.name}: {what}", f"calls raise: {what}")


def _misnamed(facts: Facts) -> Refusal | None:
    """What is wrong with what was asked for, whatever the call."""
    strategy, invariant = facts.strategy, facts.invariant
    if strategy not in STRATEGIES:
        *names, last = (f'"{name}"' for name in STRATEGIES)
        what = f"strategy must be {', '.join(names)} or {last}, got {strategy!r}"
    elif type(invariant) is not bool:
        try:
            require_flag("invariant", invariant)
        except TypeError as error:
            return Refusal(TypeError, str(error), f"calls raise: {error}")
        return None
    elif invariant and strategy in ("dense", "union"):
        what = f'strategy must be "auto" or "row" with invariant=True, got "{strategy}"'
    elif facts.screen and (strategy not in _SCREENING or invariant):
        what = f'screen=True must have strategy "auto" or "union", got "{strategy}"'
    elif not isinstance(facts.compression, int) or facts.compression not in geometry.COMPRESSIONS:
        what = f"compression must be one of {geometry.COMPRESSIONS}, got {facts.compression!r}"
        return _refusal(ValueError, facts, what)
    else:
        return None
    return Refusal(ValueError, what, f"calls raise: {what}")


def _beyond_kernels(facts: Facts) -> Route | Refusal:
    """The answer for a layer of which the kernels could read only a part."""
    if facts.called:
        why = "a projection is more than a weight and a bias"
        message = "invariant: expected plain nn.Linear projections, got others or hooks"
    else:
        why = "the threshold is a tensor, which changes during training"
        message = f"{facts.name}: threshold must be a number with invariant=True, got a tensor"
    if facts.invariant:
        return Refusal(NotImplementedError, message, f"calls raise with invariant=True: {why}")
    return Route("dense", reason=why)


def _without_kernels(facts: Facts, asked: str) -> Route | Refusal:
    """The answer for a transform or an export, which the sparse operators do not support."""
    if asked == "auto":
        return Route("dense", reason="transforms of torch.func and exports of this kind are dense")
    if facts.transformed:
        why = f'takes plain tensors, got {facts.transformed}; use strategy="dense", or "auto", which is dense then'
    elif facts.onnx:
        instead = 'export with strategy="dense", or "auto", which is dense then, or by torch.export'
        why = f"cannot be exported to ONNX, which has no such operators; {instead}"
    else:
        got = f"grad mode and operands that require grad ({', '.join(facts.needing)})"
        instead = 'export under torch.no_grad(), with frozen weights or with strategy="dense"'
        why = f"exports inference alone, got {got}; {instead}"
    return _refusal(NotImplementedError, facts, f'strategy="{asked}" {why}')
