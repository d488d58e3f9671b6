"""Layers on DTensors.

A layer
    ``ffn`` runs ``sparse_gated_ffn`` or ``sparse_ffn`` on the local parts of DTensors. Each dimension of the mesh
    divides neurons, tokens or nothing, as the placements of the operands say:

    ========  =================  ==============  =================  ============  ==============  ===========
    on it     x                  gate, up        down               b_gate, b_up  b_down          y
    ========  =================  ==============  =================  ============  ==============  ===========
    neurons   Replicate          Shard(0)        Shard(1)           Shard(0)      Replicate       Partial
    tokens    Shard(any but K)   Replicate       Replicate          Replicate     Replicate       Shard, as x
    nothing   Replicate          Replicate       Replicate          Replicate     Replicate       Replicate
    ========  =================  ==============  =================  ============  ==============  ===========

    A dimension divides neurons if any weight is sharded on it, in whatever way; else tokens, if x is sharded on one of
    its leading dimensions; else nothing. Operands placed otherwise are redistributed first, as DTensor does for
    ``nn.Linear``: tokens sharded over ranks that divide neurons are gathered, and their gradient is scattered. The two
    figures of ``Aux`` are sums over neurons and means over tokens. They are Partial on the first two kinds of
    dimension, weighted by each rank's number of tokens. Gradients follow: a Replicate operand beside sharded ones has a
    Partial gradient. Only one rank adds b_down to y, but every rank has its whole gradient.

    Where neurons are divided, each rank packs its own, numbered from 0, in tiles of 256. A packed tensor of the whole
    does not exist, and nothing is communicated before y. Rules for the operators in between would have to promise
    shapes that follow from no global shape (tiles, unions, capacities), so there is one rule for the whole block. An
    ``AutoStrategy`` sees the local problem alone: every rank measures its own neurons and may choose another strategy
    than its neighbours. The collectives lie outside and are the same for all.

Operators have no rules: torch refuses DTensors for them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from twell.choose.site import tokens_of
from twell.runtime import modes

# the dimension of each operand that counts neurons
NEURONS = {"w_gate": 0, "w_up": 0, "w_down": 1, "b_gate": 0, "b_up": 0}
WEIGHTS = ("w_gate", "w_up", "w_down")
# shares of the sparse kernels are multiples of this
MULTIPLE = 8


def ffn(
    name: str,
    local: Callable[..., Any],
    operands: Mapping[str, Tensor],
    *,
    dense: bool,
    return_aux: bool,
    **options: Any,
) -> tuple[DTensor, tuple[DTensor, DTensor] | None]:
    """Run ``local``, the function called ``name``, on DTensors: y and, if asked for, (l1, l0).

    ``operands``: those present, by name, of the right global shapes. ``dense``: whether any number of neurons will do.
    Raises TypeError if an operand is not a DTensor, ValueError for different meshes and for shares of neurons that the
    kernels do not take.
    """
    tensors, mesh = require_dtensors(name, operands)
    work = [_divides(tensors, mesh_dim) for mesh_dim in range(mesh.ndim)]
    if not dense:
        require_shares(name, tensors["w_up"].shape[0], [mesh.size(i) for i, w in enumerate(work) if w == "neurons"])
    x = tensors["x"]
    arguments: dict[str, Any] = {}
    for argument, tensor in tensors.items():
        rules = [_rule(argument, w, x.placements[i]) for i, w in enumerate(work)]
        arguments[argument] = _local(tensor, *map(tuple, zip(*rules)))
    if "b_down" in arguments and not all(mesh.get_local_rank(i) == 0 for i, w in enumerate(work) if w == "neurons"):
        arguments["b_down"] = _Elsewhere.apply(arguments["b_down"])  # type: ignore[no-untyped-call]
    result = local(**arguments, return_aux=return_aux, **options)
    y, aux = result if return_aux else (result, None)
    partial, replicate = Partial(), Replicate()
    placements = tuple(
        partial if w == "neurons" else x.placements[i] if w == "tokens" else replicate for i, w in enumerate(work)
    )
    whole = DTensor.from_local(y, mesh, placements, run_check=False, shape=x.shape, stride=_contiguous(x.shape))
    if aux is None:
        return whole, None
    tokens, mine = tokens_of(x), tokens_of(arguments["x"])
    sums = [replicate if w == "nothing" else partial for w in work]
    l1, l0 = (figure if mine == tokens else figure * (mine / max(tokens, 1)) for figure in aux)
    return whole, (
        DTensor.from_local(l1, mesh, sums, run_check=False),
        DTensor.from_local(l0, mesh, sums, run_check=False),
    )


def require_dtensors(name: str, operands: Mapping[str, Tensor]) -> tuple[dict[str, DTensor], DeviceMesh]:
    """Return the operands and their mesh. Raise TypeError or ValueError unless all are DTensors of one mesh."""
    tensors: dict[str, DTensor] = {}
    for argument, value in operands.items():
        if not isinstance(value, DTensor):
            other = next(a for a, v in operands.items() if isinstance(v, DTensor))
            raise TypeError(
                f"{name}: {argument} must be a DTensor as {other} is, got {type(value).__name__}; "
                "twell.nn.distributed.SparseMLPParallel takes care of it for the modules, DTensor.from_local makes one"
            )
        tensors[argument] = value
    first = next(iter(tensors))
    mesh = tensors[first].device_mesh
    for argument, tensor in tensors.items():
        if tensor.device_mesh != mesh:
            raise ValueError(f"{name}: {argument} must be on {mesh} as {first} is, got {tensor.device_mesh}")
    return tensors, mesh


def lay(weight: DTensor, rows: bool) -> bool:
    """Store the local part of a DTensor ``weight`` [K, N], and of its gradient, by rows of neurons, or contiguous.

    Returns whether that changed it. The Parameter stays the same object. A part sharded along K, which only
    ``fully_shard`` makes, stays as it is, because no kernel reads it.
    """
    gradient = cast("DTensor | None", weight.grad)
    with torch.no_grad():
        held = [tensor.to_local() for tensor in (weight, gradient) if tensor is not None]
        if all((part.t() if rows else part).is_contiguous() for part in held):
            return False
        if any(placement.is_shard(0) for placement in weight.placements):
            return False
        fresh = nn.Parameter(_laid(weight, rows), weight.requires_grad)
        fresh.grad, weight.grad = None if gradient is None else _laid(gradient, rows), None
    # assigning to .data would change the strides of the outer tensor but not of the local one
    torch.utils.swap_tensors(weight, fresh)  # type: ignore[no-untyped-call]
    return True


def _laid(matrix: DTensor, rows: bool) -> DTensor:
    """``matrix`` [K, N] whose local part is stored by rows of neurons, or contiguous."""
    part, (k, n) = matrix.to_local(), matrix.shape
    part, stride = (part.t().contiguous().t(), (1, k)) if rows else (part.contiguous(), (n, 1))
    placed = (matrix.device_mesh, matrix.placements)
    return DTensor.from_local(part, *placed, run_check=False, shape=matrix.shape, stride=stride)


def _sharded(placement: Placement) -> bool:
    # torch's private kinds of shards are not subclasses of Shard
    return not (placement.is_replicate() or placement.is_partial())


def _divides(tensors: Mapping[str, DTensor], mesh_dim: int) -> str:
    """Return what a dimension of the mesh divides: "neurons", "tokens" or "nothing"."""
    if any(_sharded(tensors[argument].placements[mesh_dim]) for argument in WEIGHTS if argument in tensors):
        return "neurons"
    x = tensors["x"]
    placement = x.placements[mesh_dim]
    return "tokens" if isinstance(placement, Shard) and placement.dim % x.dim() < x.dim() - 1 else "nothing"


def _rule(argument: str, work: str, x: Placement) -> tuple[Placement, Placement]:
    """Placements of an operand and of its gradient on a dimension of the mesh that divides ``work``."""
    if work == "neurons":
        if argument in NEURONS:
            return Shard(NEURONS[argument]), Shard(NEURONS[argument])
        return Replicate(), Partial() if argument == "x" else Replicate()
    if work == "tokens":
        return (x, x) if argument == "x" else (Replicate(), Partial())
    return Replicate(), Replicate()


def _local(tensor: DTensor, placements: tuple[Placement, ...], gradient: tuple[Placement, ...]) -> Tensor:
    """The local part of ``tensor``, redistributed to ``placements``; differentiable."""
    if tensor.placements != placements:
        tensor = tensor.redistribute(placements=placements)
    if modes.compiling():
        return tensor.to_local(grad_placements=gradient)
    return cast(Tensor, _Local.apply(tensor, gradient))  # type: ignore[no-untyped-call]


class _Local(torch.autograd.Function):
    """``to_local`` in eager mode for all versions of torch.

    It waits for a collective under way, makes no zero gradient where there is none, and lays a gradient out like its
    tensor. Otherwise a leaf would copy the gradient, which torch 2.9 does wrongly if it is Partial.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, gradient: tuple[Placement, ...]) -> Tensor:
        part = tensor.to_local()
        if isinstance(part, AsyncCollectiveTensor):
            part = part.wait()
        ctx.set_materialize_grads(False)
        ctx.placed = (tensor.device_mesh, gradient)
        ctx.whole = (tensor.shape, tensor.stride())
        ctx.rows = part.dim() == 2 and not part.is_contiguous() and part.t().is_contiguous()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[DTensor | None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a layer divided over ranks has no second derivative, got a backward pass with create_graph=True"
            )
        if gradient is None:
            return None, None
        laid = gradient.t().contiguous().t() if ctx.rows else gradient.contiguous()
        shape, stride = ctx.whole
        return DTensor.from_local(laid, *ctx.placed, run_check=False, shape=shape, stride=stride), None


class _Elsewhere(torch.autograd.Function):
    """Zeros in place of a bias that another rank adds. The gradient is that of the sum, which every rank has."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def require_shares(name: str, n: int, ranks: Sequence[int]) -> None:
    """Raise ValueError unless torch.chunk over ``ranks``, one mesh dimension after the other, gives sparse layers."""
    shares = {n}
    for count in ranks:
        step = {share: -(-share // count) for share in shares}
        shares = {max(0, min(step[share], share - i * step[share])) for share in shares for i in range(count)}
    if any(share == 0 or share % MULTIPLE for share in shares):
        over = " x ".join(map(str, ranks)) or "1"
        raise ValueError(
            f"{name}: each rank's share of the neurons must be a positive multiple of {MULTIPLE} for the sparse "
            f'kernels, got N = {n} over {over} ranks: {sorted(shares)} each; strategy="dense" takes any'
        )


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * max(size, 1))
    return tuple(stride)
