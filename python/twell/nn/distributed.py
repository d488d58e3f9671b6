"""Several GPUs: tensor parallelism for the modules of ``twell.nn``, and plans for whole models.

Data parallelism needs nothing from here. ``DistributedDataParallel``, ``FullyShardedDataParallel`` and ``fully_shard``
(FSDP2) take the modules as they are. FSDP2 refuses down weights that ``twell.nn.set_down_layout`` stored by rows, FSDP1
takes them. Under FSDP2 the ``aux`` of a layer may enter the loss beside the model's output, as usual. For a loss of
``aux`` alone FSDP2 does not gather the weights again for backward, unless ``aux`` is part of the output.

``torch.distributed.checkpoint`` stores and loads the modules as they are. Do not use ``broadcast_from_rank0`` for a
state dict with down weights stored by rows: torch silently broadcasts the storage of such a tensor as if it were
contiguous.

Tensor parallelism divides neurons: each rank holds rows of gate and up and columns of down and packs its own neurons;
the outputs are summed. The functions do so for any DTensors with these placements; ``SparseMLPParallel`` places those
of a module and ``tensor_parallel_plan`` those of a model::

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], twell.nn.distributed.tensor_parallel_plan(model))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

Needs a torch with distributed support.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel
from torch.utils import _pytree as pytree

from twell.base.arguments import require, require_flag
from twell.call import sharding
from twell.call.execution import Aux
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.ops.library import no_view
from twell.runtime import modes
from twell.runtime.log import logger

__all__ = ["SparseMLPParallel", "tensor_parallel_plan"]

# HF models whose attention takes the number of heads from its projections, not its configuration.
_BY_HEAD_DIM = ("llama", "mistral", "qwen2", "qwen3")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class SparseMLPParallel(ParallelStyle):
    """The style of ``parallelize_module`` for ``twell.nn.SparseGatedMLP`` and ``SparseMLP``: divides the neurons.

    Each rank holds rows of the gate and up projections with their biases, and columns of the down projection. The bias
    of the down projection is whole on all ranks and added once. The part of ``down_proj.weight`` has the module's
    ``down_layout``. Every share of neurons must be a multiple of 8, unless the strategy is "dense". ``hidden`` and
    ``intermediate`` stay those of the whole layer. With strategy "auto" each rank measures its own neurons and chooses
    for itself.

    Args:
        input_layouts: placement of x if it is not a DTensor: Replicate(), the default, or Shard(1) for sequence
            parallelism, which gathers the tokens before and scatters their gradients after.
        output_layouts: placement of y: Replicate(), the default, by an all-reduce, or Shard(1) by a reduce-scatter.
        use_local_output: y is a plain tensor, this rank's part; if false, a DTensor.

    ``aux``, returned or recorded, is that of the whole layer on every rank, in plain tensors.

    Applying it raises TypeError for another module; ValueError for a mesh of more than one dimension, shares that are
    not multiples of 8, and modules already sharded.
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
        if not all(isinstance(linear.weight, nn.Parameter) for linear in _inputs(module)):
            raise ValueError(
                f"{name}: the module must have a gate and an up projection with parameters of their own, which ranks "
                "divide, got one fused tensor or parametrizations"
            )
        for which in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(module, which, None)
            if isinstance(linear, nn.Module) and not linear._parameters.keys() >= {"weight", "bias"}:
                raise ValueError(
                    f"{name}: {which} must hold its own weight and bias, got {type(linear).__name__}; merge "
                    "adapters and remove parametrizations first"
                )
        if isinstance(module.down_proj.weight, DTensor):
            raise ValueError(f"{name}: the module must hold plain parameters, got {module.down_proj.weight.placements}")
        if module.strategy != "dense":
            sharding.require_shares(name, module.intermediate, device_mesh.size())

        source = self.src_data_rank
        module._laid.put_back()
        for linear in _inputs(module):
            for parameter in dict(linear.named_parameters()):
                _distribute(linear, parameter, device_mesh, Shard(0), source)
        down = module.down_proj
        if down.bias is not None:
            _distribute(down, "bias", device_mesh, Replicate(), source)
        if module.down_layout == "rows":
            # a rank's rows of the transposed weight are again stored by rows
            rows = distribute_tensor(down.weight.detach().t(), device_mesh, [Shard(0)], src_data_rank=source)
            down.weight = nn.Parameter(rows.t(), down.weight.requires_grad)
        else:
            _distribute(down, "weight", device_mesh, Shard(1), source)

        input_layouts, output_layouts, local = self.input_layouts, self.output_layouts, self.use_local_output

        def place(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return _place((arguments, named), device_mesh, input_layouts)

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
        module.register_forward_pre_hook(place, with_kwargs=True, prepend=True)
        module.register_forward_hook(reduce, prepend=True)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in list(hooks)[1:]:
                # torch.compile (2.11) numbers hooks by insertion, which prepending does not change
                hooks[key] = hooks.pop(key)
        return module


def tensor_parallel_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """The plan for ``parallelize_module(model, mesh, plan)`` of a model with layers of ``twell.nn``.

    - Every layer of ``twell.nn``: ``SparseMLPParallel()``.
    - Attention of the HF models Llama, Mistral, Qwen2 and Qwen3, and of the sparse ones of
      ``twell.integrations.transformers``: heads are divided. The numbers of query and of key heads must be multiples of
      the number of ranks, else applying the plan raises ValueError. Attention of other models is not divided.
    - The input embedding and the output projection that the model's ``get_input_embeddings`` and
      ``get_output_embeddings`` name: the vocabulary is divided. Tied weights stay tied. An embedding with a
      ``padding_idx`` or of a subclass, as Gemma's, is not divided, and neither is a projection tied to it.
    - All other modules with parameters and without children are whole on all ranks and compute the same there. Their
      parameters become DTensors, too, since optimizers and ``clip_grad_norm_`` take no mixture. Those of a module with
      children, of ``nn.MultiheadAttention`` and of ``nn.RNNBase`` stay plain tensors, and a warning names them.

    The model takes and returns plain tensors, the same on all ranks. The plan is a dictionary of torch's styles, whose
    entries may be replaced: ``plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)``
    leaves logits divided, for ``torch.distributed.tensor.parallel.loss_parallel``.

    Backward sums gradients over ranks. If the weights of norms of heads are replaced, as by ``copy.deepcopy`` or
    ``to(dtype)``, run one forward pass eagerly before compiled ones. Otherwise their gradients stay to be summed, and
    ``clip_grad_norm_`` of torch before 2.12 does not clip them.

    Make it after ``sparsify`` and before anything is sharded. Sequence parallelism is not part of it: HF models number
    positions by the length of their input. Dropout needs the same seed on all ranks of the mesh.

    Raises ValueError if ``model`` has no layer of ``twell.nn``, and if other modules share a parameter.
    """
    require("model", model, nn.Module, "an nn.Module")
    names = {module: name for name, module in model.named_modules()}
    plan: dict[str, ParallelStyle] = {}
    done: set[nn.Module] = set()
    for module, name in names.items():
        if isinstance(module, (SparseGatedMLP, SparseMLP)):
            plan[name] = SparseMLPParallel()
            done.update(module.modules(), _inputs(module))
    if not plan:
        raise ValueError(f"model must have layers of twell.nn, which sparsify makes, got {type(model).__name__}")
    for module, name in names.items():
        if _has_known_heads(module):
            plan[name] = _Heads()
            for child, layer in module.named_children():
                if child in _PROJECTIONS:
                    plan[f"{name}.{child}"] = RowwiseParallel() if child == "o_proj" else ColwiseParallel()
                elif dict(layer.named_parameters()):
                    # a norm of each head
                    plan[f"{name}.{child}"] = _Whole(Shard(2))
            done.update(module.modules())
    head = _vocabulary(plan, model, names)
    done.update(module for module, name in names.items() if name in plan)
    # they use parameters without calling the modules that hold them
    apart = {m for module in names if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) for m in module.modules()}
    plain: list[str] = []
    for module, name in names.items():
        if module in done or not module._parameters:
            continue
        if any(module.children()) or module in apart:
            plain += [f"{name}.{key}".removeprefix(".") for key, p in module._parameters.items() if p is not None]
        else:
            plan[name] = _Whole()
    if plain:
        logger.warning(
            "tensor_parallel_plan leaves %s as plain tensors, which clip_grad_norm_ and most optimizers do not take "
            "beside DTensors",
            ", ".join(plain),
        )
    plan.update(head)
    return plan


def _vocabulary(plan: dict[str, ParallelStyle], model: Any, names: dict[nn.Module, str]) -> dict[str, ParallelStyle]:
    """Add the input embedding and the output projection to ``plan``; return the entries that must come last."""
    embedding, head = _named(model, names, "get_input_embeddings"), _named(model, names, "get_output_embeddings")
    weight = getattr(embedding, "weight", None)
    tied = weight is not None and weight is getattr(head, "weight", None)
    _require_own(model, weight if tied else None)
    # a subclass may do more than look up; a padding index would be taken for a row of each rank's part
    divisible = type(embedding) is nn.Embedding and embedding.padding_idx is None
    divisible &= type(head) is nn.Linear or not tied
    if divisible and embedding is not None:
        plan[names[embedding]] = _Embedding(input_layouts=Replicate(), output_layouts=Replicate())
    if type(head) is nn.Linear and (divisible or not tied):
        plan[names[head]] = ColwiseParallel(output_layouts=Replicate())
    if embedding is None or head is None or not tied:
        return {}
    return {"": _Tied(names[embedding], names[head])}


def _require_own(model: nn.Module, tied: Any) -> None:
    """Raise ValueError if modules share a parameter other than ``tied``: each would get its own."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append(f"{name}.{key}")
    for parameter, several in owners.items():
        if len(several) > (2 if parameter is tied else 1):
            raise ValueError(
                f"modules must have parameters of their own, except for the embedding and the output projection, got "
                f"one shared by {', '.join(several)}, which would become several"
            )


def _named(model: Any, names: dict[nn.Module, str], getter: str) -> nn.Module | None:
    """The submodule that ``model``'s method ``getter`` returns; None without the method or for another result."""
    module = getattr(model, getter, lambda: None)()
    return module if isinstance(module, nn.Module) and module in names else None


class _Embedding(RowwiseParallel):
    """The style of an embedding with a divided vocabulary, whose output has arrived.

    torch's returns one that still may be on its way. A layer compiled on its own gives such an input a gradient that
    the embedding's backward does not take.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, __, y: no_view(y))
        return module


class _Heads(PrepareModuleInput):
    """The style of an attention module with divided projections: a DTensor as input, its gradient summed once."""

    def __init__(self) -> None:
        whole: dict[str, Placement] = {"hidden_states": Replicate()}
        super().__init__(input_kwarg_layouts=whole, desired_input_kwarg_layouts=whole)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention: Any = module
        for child in ("q_proj", "k_proj"):
            heads = attention.get_submodule(child).out_features // attention.head_dim
            if heads % device_mesh.size():
                raise ValueError(
                    f"the number of heads of {child} must be a multiple of the {device_mesh.size()} ranks, got {heads}"
                )
        return super()._apply(module, device_mesh)


class _Whole(ParallelStyle):
    """The style of a module that is whole on every rank: DTensors as parameters, plain inputs and outputs.

    Where ranks hold parts of the input, the gradients of its parameters are sums over ranks, which backward makes.
    Functions that change gradients in place do not take those that are still to be summed: ``clip_grad_norm_`` and
    ``clip_grad_value_`` of torch before 2.12 silently leave them as they are, and later the second raises an error.
    """

    def __init__(self, layout: Placement | None = None) -> None:
        super().__init__()
        self.layouts = (layout or Replicate(),)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in dict(module.named_parameters()):
            _distribute(module, name, device_mesh, Replicate(), self.src_data_rank)
        for name, buffer in list(module.named_buffers()):
            whole = distribute_tensor(buffer, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_buffer(name, whole, persistent=name not in module._non_persistent_buffers_set)
        layouts = self.layouts

        if layouts != (Replicate(),):
            _sum_gradients(module, ())
            module.register_forward_pre_hook(_sum_gradients)

        def place(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return _place((arguments, named), device_mesh, layouts)

        def take(_: nn.Module, __: object, result: Any) -> Any:
            return pytree.tree_map_only(DTensor, lambda t: _redistributed(t, layouts, True), result)

        module.register_forward_pre_hook(place, with_kwargs=True)
        module.register_forward_hook(take)
        return module


class _Tied(ParallelStyle):
    """The style that ties the output projection to the embedding again, after each got its own DTensor."""

    def __init__(self, embedding: str, head: str) -> None:
        super().__init__()
        self.embedding, self.head = embedding, head

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.get_submodule(self.head).weight = module.get_submodule(self.embedding).weight
        return module


def _inputs(layer: SparseGatedMLP | SparseMLP) -> list[nn.Linear]:
    """The projections of x, which need not be children."""
    return [layer.gate_proj, layer.up_proj] if isinstance(layer, SparseGatedMLP) else [layer.up_proj]


def _has_known_heads(module: nn.Module) -> bool:
    kind = getattr(getattr(module, "config", None), "model_type", None)
    children = dict(module.named_children())
    return kind in _BY_HEAD_DIM and all(type(children.get(name)) is nn.Linear for name in _PROJECTIONS)


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None) -> None:
    """Make a parameter of ``module`` a DTensor with the values of rank ``source``, or of each rank for None."""
    parameter = module.get_parameter(name)
    placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
    module.register_parameter(name, nn.Parameter(placed, parameter.requires_grad))


def _sum_gradients(module: nn.Module, _: object) -> None:
    """Have the gradients of ``module``'s parameters summed over ranks in backward.

    Called before each forward, since parameters may be others by then. Compiled code does not call it: a parameter that
    was replaced before its first forward, compiled, keeps a gradient that is still to be summed.
    """
    if modes.compiling():
        return
    for parameter in module.parameters(recurse=False):
        hooks = parameter._backward_hooks
        if hooks is not None and _summed in hooks.values():
            # module.to(dtype) swaps in another tensor, which does not know the hooks until they are set again
            parameter._backward_hooks = hooks
        elif parameter.requires_grad:
            parameter.register_hook(_summed)  # type: ignore[no-untyped-call]


def _summed(gradient: DTensor) -> DTensor:
    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])


def _place(tree: Any, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Any:
    """``tree`` with DTensors in place of its plain tensors."""

    def place(t: Tensor) -> Tensor:
        return t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, placements, run_check=False)

    return pytree.tree_map_only(Tensor, place, tree)


def _redistributed(t: DTensor, placements: tuple[Placement, ...], local: bool) -> Tensor:
    if t.placements != placements:
        t = t.redistribute(placements=placements)
    return t.to_local() if local else t
