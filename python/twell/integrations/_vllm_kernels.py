"""What a worker of vLLM says of twell when its model is made: whether kernels run, and what will."""

from typing import Any

import torch

from twell.base.activation import Activation
from twell.choose import cards
from twell.choose.plan import Route
from twell.ops.float8 import E4M3
from twell.runtime import device, host, specs

# Neurons of the layer that is tried, as kernels depend on K and not on N, and tokens: other kernels take few.
_NEURONS, _TOKENS = 64, (1, specs.DECODE_TOKENS[-1] + 1)

_REMEDY = (
    "`twell info` shows what is installed; install a wheel with kernels for this GPU, or the extra jit, which compiles "
    "them, or set TWELL_VLLM=off"
)


def dense_because(route: Route, on: torch.device) -> str:
    """Why "auto" is "dense" on a device; "" where it chooses, and for other strategies."""
    return cards.imposed(on.type, on.index) if route.strategy == "auto" else ""


def trouble(
    route: Route,
    compression: int,
    on: torch.device,
    activation: Activation,
    gated: bool,
    k: int,
    dtype: torch.dtype,
    experts: bool = False,
) -> str:
    """Run a small layer on a GPU, which loads kernels; return why that fails and what to do, "" if it does not.

    ``dtype``: of the weights. A strategy that needs no kernels is not tried.
    """
    if on.type != "cuda" or route.strategy == "dense" or (not experts and dense_because(route, on)):
        return ""
    e4m3, each = dtype == E4M3, [1] * experts
    try:
        weight = torch.zeros(*each, _NEURONS, k, dtype=dtype, device=on)
        scales = (torch.zeros(*each, size, dtype=torch.float32, device=on) for size in (_NEURONS, k))
        scale, down_scale = ([given] for given in scales) if e4m3 else ([], [])
        for m in _TOKENS:
            x = torch.zeros(m, k, dtype=torch.bfloat16 if e4m3 else dtype, device=on)
            layer = x, weight, weight if gated else None, weight
            own = [None, *scale, *(scale if gated else [None]), *down_scale] if e4m3 else []
            how: tuple[Any, ...] = *activation, route.invariant
            if experts:
                ids = torch.zeros(m, 1, dtype=torch.int32, device=on)
                torch.ops.twell.experts(*layer, ids, ids.float(), compression, "row", *how, None, None, *own)
            else:
                named = "row" if route.strategy == "auto" else route.strategy
                for strategy, screen in [(named, False), *[("union", True)] * (route.screen and not e4m3)]:
                    how = *activation, screen, route.invariant
                    torch.ops.twell.ffn(*layer, None, None, None, compression, strategy, None, *how, None, *own)
        torch.cuda.synchronize(on)
    except Exception as error:
        # whatever goes wrong here would go wrong in a request
        said = str(error).strip().partition("\n")[0]
        return f"its kernels cannot be loaded ({type(error).__name__}: {said}); {_REMEDY}"
    return ""


def described(route: Route, on: torch.device, float8: bool = False, experts: bool = False) -> str:
    """What layers run on a device: the strategy, and on a GPU who launches its kernels and whose costs "auto" has."""
    strategy = f'strategy "{route.name}"'
    if not experts and (why := dense_because(route, on)):
        return f'{strategy}, which is "dense": {why}'
    if on.type != "cuda" or route.strategy == "dense":
        return strategy
    launches = f"launches by {host.runner()}"
    if experts or route.strategy != "auto":
        return f"{strategy}, {launches}"
    if float8:
        return f"{strategy}, {launches}, estimated costs"
    card = cards.in_use(on)
    source = "shipped" if card.file is None else str(card.file)
    return f"{strategy}, {launches}, rates of {card.gpu} ({source}) on {device.name(on.index or 0)}"
