"""Layers on DTensors, whose neurons a mesh of one dimension divides.

``ffn`` runs ``sparse_gated_ffn`` or ``sparse_ffn`` on the local parts: gate and up Shard(0), down Shard(1), b_gate and
b_up Shard(0), x and b_down Replicate. Operands placed otherwise are redistributed first, as DTensor does for
``nn.Linear``: tokens sharded over ranks are gathered, and their gradient is scattered. y and the figures of ``Aux`` are
Partial. Gradients follow: that of x is Partial. Only one rank adds b_down to y, but every rank has its whole gradient.

Each rank packs its own neurons, numbered from 0, and nothing is communicated before y. Operators have no rules, as
their shapes (tiles, unions, capacities) follow from no global shape: torch refuses DTensors for them. An
``AutoStrategy`` sees the local problem alone, so ranks may choose different strategies.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from twell.runtime import modes

# the dimension of each operand that counts neurons
NEURONS = {"w_gate": 0, "w_up": 0, "w_down": 1, "b_gate": 0, "b_up": 0}
WEIGHTS = ("w_gate", "w_up", "w_down")
# shares of the sparse kernels are multiples of this
MULTIPLE = 8


def ffn(
    name: str, local: Any, operands: Mapping[str, Tensor], *, dense: bool, return_aux: bool, **options: Any
) -> tuple[DTensor, tuple[DTensor, DTensor] | None]:
    """Run ``local``, called ``name``, on DTensors: y and, if asked for, (l1, l0); if ``dense``, of any shares."""
    tensors, mesh = require_dtensors(name, operands)
    placed = {argument: tensors[argument].placements for argument in WEIGHTS if argument in tensors}
    if mesh.ndim != 1 or not any(_sharded(placements[0]) for placements in placed.values()):
        what = "DTensors must be of a mesh of one dimension, over which a weight is sharded"
        raise NotImplementedError(f"{name}: {what}, got weights {placed} of {mesh}")
    if not dense:
        require_shares(name, tensors["w_up"].shape[0], mesh.size())
    x = tensors["x"]
    arguments: dict[str, Any] = {}
    for argument, tensor in tensors.items():
        own: Placement = Shard(NEURONS[argument]) if argument in NEURONS else Replicate()
        arguments[argument] = _local(tensor, (own,), (Partial(),) if argument == "x" else (own,))
    if "b_down" in arguments and mesh.get_local_rank() != 0:
        arguments["b_down"] = _Elsewhere.apply(arguments["b_down"])  # type: ignore[no-untyped-call]
    result = local(**arguments, return_aux=return_aux, **options)
    y, aux = result if return_aux else (result, None)
    partial, stride = (Partial(),), torch.empty(x.shape, device="meta").stride()
    whole = DTensor.from_local(y, mesh, partial, run_check=False, shape=x.shape, stride=stride)
    if aux is None:
        return whole, None
    l1, l0 = (DTensor.from_local(figure, mesh, partial, run_check=False) for figure in aux)
    return whole, (l1, l0)


def require_dtensors(name: str, operands: Mapping[str, Tensor]) -> tuple[dict[str, DTensor], DeviceMesh]:
    """Return the operands and their mesh. Raise TypeError or ValueError unless all are DTensors of one mesh."""
    tensors: dict[str, DTensor] = {}
    for argument, value in operands.items():
        if not isinstance(value, DTensor):
            other = next(a for a, v in operands.items() if isinstance(v, DTensor))
            got = f"{type(value).__name__}; twell.nn.distributed.SparseMLPParallel takes care of it for the modules"
            what = f"{argument} must be a DTensor as {other} is, got {got}, DTensor.from_local makes one"
            raise TypeError(f"{name}: {what}")
        tensors[argument] = value
    first = next(iter(tensors))
    mesh = tensors[first].device_mesh
    for argument, tensor in tensors.items():
        if tensor.device_mesh != mesh:
            raise ValueError(f"{name}: {argument} must be on {mesh} as {first} is, got {tensor.device_mesh}")
    return tensors, mesh


def lay(weight: DTensor, rows: bool) -> bool:
    """Store the local part of a DTensor ``weight`` [K, N], and of its gradient, by rows of neurons, or contiguous.

    Returns whether that changed it; the Parameter stays the same object. A part sharded along K stays as it is.
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


def _local(tensor: DTensor, placements: tuple[Placement, ...], gradient: tuple[Placement, ...]) -> Tensor:
    """The local part of ``tensor``, redistributed to ``placements``; differentiable."""
    if tensor.placements != placements:
        tensor = tensor.redistribute(placements=placements)
    if modes.compiling():
        return tensor.to_local(grad_placements=gradient)
    return cast(Tensor, _Local.apply(tensor, gradient))  # type: ignore[no-untyped-call]


class _Local(torch.autograd.Function):
    """``to_local`` in eager mode, which waits for a collective under way and lays a gradient out like its tensor.

    Otherwise a leaf would copy the gradient, which torch 2.9 does wrongly if it is Partial.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, gradient: tuple[Placement, ...]) -> Tensor:
        part = tensor.to_local()
        if isinstance(part, AsyncCollectiveTensor):
            part = part.wait()
        ctx.set_materialize_grads(False)
        ctx.placed, ctx.whole = (tensor.device_mesh, gradient), (tensor.shape, tensor.stride())
        ctx.rows = part.dim() == 2 and not part.is_contiguous() and part.t().is_contiguous()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[DTensor | None, None]:
        if torch.is_grad_enabled():
            got = "a backward pass with create_graph=True"
            raise RuntimeError(f"a layer divided over ranks has no second derivative, got {got}")
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


def require_shares(name: str, n: int, ranks: int) -> None:
    """Raise ValueError unless torch.chunk of ``n`` neurons over ``ranks`` gives sparse layers."""
    step = -(-n // ranks)
    shares = {max(0, min(step, n - i * step)) for i in range(ranks)}
    if any(share == 0 or share % MULTIPLE for share in shares):
        expected = f"a positive multiple of {MULTIPLE} for the sparse kernels"
        got = f'N = {n} over {ranks} ranks: {sorted(shares)} each; strategy="dense" takes any'
        raise ValueError(f"{name}: each rank's share of the neurons must be {expected}, got {got}")
