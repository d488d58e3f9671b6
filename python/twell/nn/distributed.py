"""Several GPUs: tensor parallelism for the modules of ``twell.nn``, and plans for whole models.

It needs a torch with distributed support. Data parallelism needs nothing from here: DDP, FSDP1 and ``fully_shard``
(FSDP2) take the modules as they are, and ``torch.distributed.checkpoint`` stores them. FSDP2, and
``broadcast_from_rank0`` of a state dict, need down weights that ``twell.nn.set_down_layout`` did not store by rows. For
a loss of ``aux`` alone FSDP2 does not gather the weights again.

Tensor parallelism divides neurons: each rank holds rows of gate and up and columns of down; the outputs are summed::

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], twell.nn.distributed.tensor_parallel_plan(model))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils import _pytree as pytree

from twell.base.arguments import require, require_flag
from twell.call import sharding
from twell.call.execution import Aux
from twell.nn import down_layout
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.ops.library import no_view

__all__ = ["SparseMLPParallel", "tensor_parallel_plan"]


class SparseMLPParallel(ParallelStyle):
    """The style of ``parallelize_module`` for ``twell.nn.SparseGatedMLP`` and ``SparseMLP``: divides the neurons.

    Each rank holds rows of the gate and up projections with their biases, and columns of the down projection, in the
    module's ``down_layout``; the down bias is whole on all ranks and added once. Every share of neurons must be a
    multiple of 8, unless the strategy is "dense". ``hidden`` and ``intermediate`` stay those of the whole layer. With
    strategy "auto" each rank measures its own neurons and chooses for itself.

    Args:
        input_layouts: placement of x if it is not a DTensor: Replicate(), the default, or Shard(1) for sequence
            parallelism, which gathers the tokens before and scatters their gradients after.
        output_layouts: placement of y: Replicate(), the default, by an all-reduce, or Shard(1) by a reduce-scatter.
        use_local_output: y is a plain tensor, this rank's part; if false, a DTensor.

    ``aux``, returned or recorded, is that of the whole layer on every rank, in plain tensors. Applying it raises
    TypeError for another module; ValueError for a mesh of more than one dimension, shares that are not multiples of 8,
    and modules already sharded.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        for name, layout in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            require(f"SparseMLPParallel: {name}", layout, (Placement, type(None)), "a Placement or None")
        require_flag("SparseMLPParallel: use_local_output", use_local_output)
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output

    def __repr__(self) -> str:
        options = f"{self.input_layouts[0]!r}, {self.output_layouts[0]!r}, use_local_output={self.use_local_output}"
        return f"SparseMLPParallel({options})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = type(self).__name__
        if not isinstance(module, (SparseGatedMLP, SparseMLP)):
            raise TypeError(f"{name}: module must be a SparseGatedMLP or a SparseMLP, got {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise ValueError(f'{name}: the mesh must have one dimension, as mesh["tp"] has, got {device_mesh}')
        for which in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(module, which, None)
            if isinstance(linear, nn.Module) and not linear._parameters.keys() >= {"weight", "bias"}:
                got = f"{type(linear).__name__}: merge adapters and remove parametrizations first"
                what = f"{which} must hold a weight and a bias as parameters of its own, got {got}"
                raise ValueError(f"{name}: {what}; gate and up in one are not divided")
        if isinstance(module.down_proj.weight, DTensor):
            raise ValueError(f"{name}: the module must hold plain parameters, got {module.down_proj.weight.placements}")
        if module.strategy != "dense":
            sharding.require_shares(name, module.intermediate, device_mesh.size())

        source = self.src_data_rank
        module._laid.put_back()
        for linear in _inputs(module):
            for parameter in dict(linear.named_parameters()):
                _distribute(linear, parameter, device_mesh, Shard(0), source)
        if module.down_proj.bias is not None:
            _distribute(module.down_proj, "bias", device_mesh, Replicate(), source)
        _distribute(module.down_proj, "weight", device_mesh, Shard(1), source)
        down_layout.store(module.down_proj.weight, rows=module.down_layout == "rows")

        output_layouts, local = self.output_layouts, self.use_local_output

        def reduce(layer: Any, _: object, result: Any) -> Any:
            y, aux = result if isinstance(result, tuple) else (result, None)
            figures = layer.aux if layer.record_aux else aux
            if figures is not None:
                figures = Aux(*(_redistributed(figure, (Replicate(),), True) for figure in figures))
            if layer.record_aux:
                layer.aux = figures
            y = _redistributed(y, output_layouts, local)
            y = no_view(y) if local else y
            return (y, figures) if isinstance(result, tuple) else y

        # prepended: other hooks, earlier or later, see DTensors that fit the weights go in and figures of the whole
        # layer come out
        module.register_forward_pre_hook(_placing(device_mesh, self.input_layouts), with_kwargs=True, prepend=True)
        module.register_forward_hook(reduce, prepend=True)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in list(hooks)[1:]:
                # torch.compile (2.11) numbers hooks by insertion, which prepending does not change
                hooks[key] = hooks.pop(key)
        return module


def tensor_parallel_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """The plan for ``parallelize_module(model, mesh, plan)`` of a model with layers of ``twell.nn``.

    - Every layer of ``twell.nn``: ``SparseMLPParallel()``.
    - All other modules with parameters and without children are whole on all ranks and compute the same there. Their
      parameters become DTensors, too, since optimizers and ``clip_grad_norm_`` take no mixture; shared ones stay
      shared. Those of a module with children, of ``nn.MultiheadAttention`` and of ``nn.RNNBase`` stay plain tensors.

    The model takes and returns plain tensors, the same on all ranks. Entries of the plan, torch's styles, may be
    replaced: ``plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())`` divides a vocabulary whose weight no
    other module has, and ``ColwiseParallel()`` of ``q_proj``, ``k_proj`` and ``v_proj`` with ``RowwiseParallel()`` of
    ``o_proj`` the heads of Llama, Mistral and Qwen2.

    Make it after ``sparsify`` and before anything is sharded. Sequence parallelism is not part of it: HF models number
    positions by the length of their input. Dropout needs the same seed on all ranks of the mesh. Raises ValueError if
    ``model`` has no layer of ``twell.nn``.
    """
    require("model", model, nn.Module, "an nn.Module")
    names = {module: name for name, module in model.named_modules()}
    plan: dict[str, ParallelStyle] = {}
    done: set[nn.Module] = set()
    for module, name in names.items():
        if isinstance(module, (SparseGatedMLP, SparseMLP)):
            plan[name] = SparseMLPParallel()
            done.update(module.modules(), _inputs(module))
        # they use parameters without calling the modules that hold them
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            done.update(module.modules())
    if not plan:
        raise ValueError(f"model must have layers of twell.nn, which sparsify makes, got {type(model).__name__}")
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module, name in names.items():
        if module not in done and module._parameters and not any(module.children()):
            plan[name] = _Whole(made)
    return plan


class _Whole(ParallelStyle):
    """The style of a module that is whole on every rank: DTensors as parameters, plain inputs and outputs.

    made: the DTensors of parameters, which several modules may have.
    """

    def __init__(self, made: dict[nn.Parameter, nn.Parameter]) -> None:
        super().__init__()
        self.made = made

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters()):
            if parameter not in self.made:
                _distribute(module, name, device_mesh, Replicate(), self.src_data_rank)
                self.made[parameter] = module.get_parameter(name)
            module.register_parameter(name, self.made[parameter])
        for name, buffer in list(module.named_buffers()):
            whole = distribute_tensor(buffer, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_buffer(name, whole, persistent=name not in module._non_persistent_buffers_set)

        def take(_: nn.Module, __: object, result: Any) -> Any:
            return pytree.tree_map_only(DTensor, lambda t: _redistributed(t, (Replicate(),), True), result)

        module.register_forward_pre_hook(_placing(device_mesh, (Replicate(),)), with_kwargs=True)
        module.register_forward_hook(take)
        return module


def _inputs(layer: SparseGatedMLP | SparseMLP) -> list[nn.Linear]:
    """The projections of x, which need not be children."""
    return [layer.gate_proj, layer.up_proj] if isinstance(layer, SparseGatedMLP) else [layer.up_proj]


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None) -> None:
    """Make a parameter of ``module`` a DTensor with the values of rank ``source``, or of each rank for None."""
    parameter = module.get_parameter(name)
    placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
    module.register_parameter(name, nn.Parameter(placed, parameter.requires_grad))


def _placing(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Any:
    """A pre-hook with arguments by name, which puts DTensors in place of plain tensors."""

    def place(t: Tensor) -> Tensor:
        return t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, placements, run_check=False)

    return lambda _, *arguments: pytree.tree_map_only(Tensor, place, arguments)


def _redistributed(t: DTensor, placements: tuple[Placement, ...], local: bool) -> Tensor:
    if t.placements != placements:
        t = t.redistribute(placements=placements)
    return t.to_local() if local else t
