"""What a worker of vLLM says of twell when its model is made: whether kernels run, and what will."""

from __future__ import annotations

import torch

from twell._activation import Activation
from twell._runtime import device, host
from twell.float8 import E4M3
from twell.strategy import tables
from twell.strategy.plan import Route

# Neurons of the layer that is tried: kernels depend on K and not on N.
_NEURONS = 64

_REMEDY = (
    "`twell info` shows what is installed; install a wheel with kernels for this GPU, or the extra jit, which compiles "
    "them, or set TWELL_VLLM=off"
)


def dense_because(route: Route, on: torch.device) -> str:
    """Why "auto" is "dense" on a device; "" where it chooses, and for other strategies."""
    return tables.imposed(on.type, on.index) if route.strategy == "auto" else ""


def trouble(
    route: Route, compression: int, on: torch.device, activation: Activation, gated: bool, k: int, dtype: torch.dtype
) -> str:
    """Run a small layer on a GPU, which loads kernels; return why that fails and what to do, "" if it does not.

    ``dtype``: of the weights. A strategy that needs no kernels is not tried.
    """
    if on.type != "cuda" or route.strategy == "dense" or dense_because(route, on):
        return ""
    strategy = "row" if route.strategy == "auto" else route.strategy
    try:
        weight, options = torch.zeros(_NEURONS, k, dtype=dtype, device=on), (compression, strategy, None, *activation)
        x = torch.zeros(1, k, dtype=torch.bfloat16 if dtype == E4M3 else dtype, device=on)
        if dtype == E4M3:
            scale, down_scale = (torch.zeros(size, dtype=torch.float32, device=on) for size in (_NEURONS, k))
            first = weight, scale, *((weight, scale) if gated else (None, None))
            operands = x, None, *first, weight, down_scale, None, None, None
            torch.ops.twell.ffn_float8(*operands, *options, True, route.invariant)
        else:
            operands = x, weight, weight if gated else None, weight, None, None, None
            torch.ops.twell.ffn(*operands, *options, False, route.invariant)
        torch.cuda.synchronize(on)
    except Exception as error:
        # whatever goes wrong here would go wrong in a request
        return _unloadable(error)
    return ""


def trouble_of_experts(
    route: Route, compression: int, on: torch.device, activation: Activation, gated: bool, k: int, dtype: torch.dtype
) -> str:
    """As ``trouble``, of a layer of experts."""
    if on.type != "cuda" or route.strategy == "dense":
        return ""
    try:
        ids, weight = (
            torch.zeros(1, 1, dtype=torch.int32, device=on),
            torch.zeros(1, _NEURONS, k, dtype=dtype, device=on),
        )
        x = torch.zeros(1, k, dtype=torch.bfloat16 if dtype == E4M3 else dtype, device=on)
        options = (ids, ids.float(), compression, "row", *activation, route.invariant)
        if dtype == E4M3:
            scale, down_scale = (torch.zeros(1, size, dtype=torch.float32, device=on) for size in (_NEURONS, k))
            torch.ops.twell.experts_float8(x, None, weight, scale, None, None, weight, down_scale, *options)
        else:
            torch.ops.twell.experts(x, weight, weight if gated else None, weight, *options)
        torch.cuda.synchronize(on)
    except Exception as error:
        return _unloadable(error)
    return ""


def _unloadable(error: Exception) -> str:
    said = str(error).strip().partition("\n")[0]
    return f"its kernels cannot be loaded ({type(error).__name__}: {said}); {_REMEDY}"


def described(route: Route, on: torch.device, float8: bool = False) -> str:
    """What layers run on a device: the strategy, and on a GPU who launches its kernels and whose costs "auto" has.

    ``float8``: whether their weights are in e4m3, of which nothing was measured.
    """
    strategy = f'strategy "{route.name}"'
    if why := dense_because(route, on):
        return f'{strategy}, which is "dense": {why}'
    if on.type != "cuda" or route.strategy == "dense":
        return strategy
    launches = f"launches by {host.runner()}"
    if route.strategy != "auto":
        return f"{strategy}, {launches}"
    if float8:
        return f"{strategy}, {launches}, estimated costs"
    table = tables.in_use(on)
    source = "shipped" if table.file is None else str(table.file)
    return f"{strategy}, {launches}, costs of {table.gpu} ({source}) on {device.name(on.index or 0)}"


def described_experts(route: Route, on: torch.device) -> str:
    """What layers of experts run on a device: the strategy, and on a GPU who launches its kernels."""
    strategy = f'strategy "{route.name}"'
    return strategy if on.type != "cuda" or route.strategy == "dense" else f"{strategy}, launches by {host.runner()}"
