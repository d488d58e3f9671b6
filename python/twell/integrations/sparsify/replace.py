"""``sparsify_``: plan which modules of a model are replaced, then replace all of them or none."""

import gc
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from twell.base.activation import NAMES_OF_FAMILY, Activation
from twell.base.memory import shared
from twell.call.functional import Strategy
from twell.call.plain import of_torch, own_code
from twell.choose.plan import Facts, routed
from twell.integrations.sparsify import candidates, quantised
from twell.integrations.sparsify.candidates import LEAVE_OUT, Candidate, label
from twell.integrations.sparsify.known import LIKELY, SEQUENCE, Known, has_children, known, sequence_of
from twell.nn import converted
from twell.nn.layers import GATED, PLAIN, SparseFFN, SparseGatedMLP, SparseMLP
from twell.nn.models import named_layers
from twell.nn.pairs import SparseDown, pair_up, put_pair
from twell.runtime import geometry
from twell.runtime.log import logger

Filter = Callable[[nn.Module, str], bool]
Names = Sequence[str] | Sequence[Sequence[str]]
Model = TypeVar("Model", bound=nn.Module)

# What another activation may be replaced with; the threshold of fatrelu must be chosen first.
_TARGETS = ("relu", "relu2", "drelu")

_STACKED = (
    "experts whose weights are stacked in one tensor stay as they are; twell.integrations.transformers.sparsify takes "
    "those with an activation of the ReLU family, and twell.sparse_experts computes them"
)


class Plan(NamedTuple):
    """The candidates for ``apply``, the names that ``filter_fn`` left out, and what else stays as it is.

    unknown: a sentence about modules of unknown classes. remarks: why modules that look like layers are none.
    """

    candidates: list[Candidate]
    left: list[str]
    unknown: str
    remarks: list[str]


def sparsify_(
    model: Model,
    filter_fn: Filter | None = None,
    *,
    activation: Literal["relu", "relu2", "drelu"] | None = None,
    compression: int = 8,
    strategy: Strategy = "auto",
    names: Names | None = None,
) -> Model:
    """Run the feed-forward layers of ``model`` that have ReLU, or another activation of its family, through twell.

    In place; returns ``model``. The log says how many layers were taken, at INFO, and ``twell.explain`` shows them. The
    activations are relu, relu2 (squared), drelu and fatrelu, with its threshold. Two kinds of modules are taken,
    wherever they are in ``model``:

    - those of classes that are known by name: the architectures of the page on models, and torch's
      ``nn.TransformerEncoderLayer`` and ``nn.TransformerDecoderLayer``, which then leave their fast path. A subclass
      counts if it has nothing but an ``__init__`` of its own.
    - those that ``names`` tells by the names of their ``nn.Linear`` children: gate, up [N, K] and down [K, N]; up and
      down; or gate and up in one [2 N, K] and down, read as two views. "a.b" is the child b of a child a.

    Others stay as they are. Of those that look like feed-forward layers a line of the log has the call that tries them.

    A module that is a layer as a whole stays the same object and becomes one of ``twell.nn`` with the same children. In
    any other block two layers become a pair: the first and the activation leave their work to the second. Parameters
    stay the same objects, stored as they were, and state dicts keep their keys, so optimizers, checkpoints and tied
    weights hold. In inference on a GPU a layer stores its down weight by rows (``twell.nn.set_down_layout``). A module
    used in several places is replaced once, in all of them. Experts that are modules count as layers.

    Projections that transformers has loaded in e4m3 become a ``twell.nn.Float8MLP``, for inference, or a layer in
    bfloat16 of dequantised weights, which a warning says; ``save_pretrained`` refuses from then on. Others may have
    adapters of peft, or weights that bitsandbytes holds in 4 bits or torchao in a weight-only format. docs/models.md
    says which run sparse, what else may be put around layers later, and what is checked. The model's own modules are
    never run, and its tensors are neither read nor needed, except for buffers: it may be on ``meta``.

    Args:
        model: any module that is or contains such layers; for a model of transformers see
            ``twell.integrations.transformers.sparsify``, which also keeps its configuration right.
        filter_fn: called with each candidate and its qualified name; False leaves the candidate as it is.
        activation: None keeps each layer's own and refuses candidates with none of the family. Another replaces what
            differs and logs that: the model then computes another function and is of use only after training. "drelu"
            needs gates.
        compression, strategy: of every layer, as in ``twell.sparse_gated_ffn``. With "auto" each chooses for itself.
        names: (gate, up, down), (up, down) or (gate and up in one, down), in this order, or a list of such tuples.
            The gate is the projection that the activation is applied to. An order that the module does not compute is
            refused.

    Raises TypeError or ValueError and changes nothing: if nothing is found; if a candidate computes something else, has
    further children or state, hooks, methods of ``nn.Module`` overridden, projections that are neither plain
    ``nn.Linear`` nor any of the above (sharded, offloaded, quantised otherwise), or sizes that the kernels do not take
    (multiples of 8, K up to 16,384 and N up to 65,536). Modules whose projections do not go from K to N to K are no
    candidates.
    """
    routed(Facts(strategy=strategy))
    geometry.words_per_tile(compression)
    apply(model, plan(model, filter_fn, activation, strategy, names), compression, strategy)
    return model


def plan(
    model: nn.Module,
    filter_fn: Filter | None,
    activation: str | None,
    strategy: str,
    names: Names | None = None,
    served: Collection[nn.Module] = (),
    some: bool = False,
) -> Plan:
    """Plan ``sparsify_``: the same checks and errors, without any change.

    served: stacked experts that the caller takes; then there need be no layers. some: whether layers of another
    activation are left as they are, which the log says, if there are others.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"sparsify_: model must be an nn.Module, got {type(model).__name__}")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TypeError(f"sparsify_: model must be Python code, got a {type(model).__name__} of torch.jit")
    if activation not in (None, *_TARGETS):
        later = "; training finds its threshold: twell.recipe.TargetThreshold"
        raise ValueError(
            f"sparsify_: activation must be None or one of {', '.join(_TARGETS)}, got {activation!r}"
            f"{later if activation == 'fatrelu' else ''}"
        )
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"sparsify_: filter_fn must be a function of a module and its name, got {filter_fn!r}")
    told, context = _told(names), candidates.Context(model, strategy, put, {})
    for group in told:
        if not any(all(converted.below(module, name) is not None for name in group) for module in model.modules()):
            logger.warning("no module has the children %s, which names= tells", ", ".join(group))
    taken: list[Candidate] = []
    left: list[str] = []
    unlike: list[Candidate] = []
    unknown: list[tuple[str, tuple[str, ...]]] = []
    remarks: dict[str, str] = {}
    whole = {sequence_of(module) for module in model.modules()}
    for name, module in candidates.outside_layers(model):
        if bare := next((group for group in told if all(module._parameters.get(n) is not None for n in group)), None):
            remarks.setdefault(
                type(module).__name__,
                f"{label(name, module)} has {', '.join(bare)} as parameters, which no module applies: call "
                "twell.sparse_ffn or sparse_gated_ffn on them in its forward",
            )
        found = SEQUENCE if module in whole else known(module)
        found = found or next((Known(group) for group in told if has_children(module, group)), None)
        if found and found.sparse and not getattr(module, found.sparse, 0):
            if activation is None:
                why = f"makes no zeros: its {found.sparse} is 0"
                remarks.setdefault(type(module).__name__, f"{label(name, module)} {why}")
                continue
            found = Known(found.names)
        if not found:
            if module in served:
                continue
            if candidates.holds_stacked_experts(module):
                remarks.setdefault(_STACKED, f"{label(name, module)}: {_STACKED}")
            elif likely := _likely(module):
                unknown.append((label(name, module), likely))
        elif why := candidates.misfit(module, found.names):
            remarks.setdefault(type(module).__name__, f"{label(name, module)} is no layer: {why}")
        elif filter_fn is not None and not filter_fn(module, name):
            left.append(name)
        else:
            candidate, of = candidates.examine(name, module, found, context)
            if of is None and activation is None:
                unlike.append(candidate)
                if some:
                    continue
                raise ValueError(_explain_activation(candidate))
            taken.append(_with_activation(candidate, of, activation))
    planned = Plan(taken, left, _about_unknown(unknown, told), list(remarks.values()))
    if unlike and not taken and not served:
        raise ValueError(_explain_activation(unlike[0]))
    if unlike:
        first = label(unlike[0].name, unlike[0].module), unlike[0].was
        logger.warning("layers left out that make no zeros: %d, the first %s with %s", len(unlike), *first)
    if not taken and not served:
        raise ValueError(_nothing_found(model, planned))
    _require_reachable(model, taken)
    return planned


def _likely(module: nn.Module) -> tuple[str, ...]:
    """The names of children that may be the projections of a layer, in a module that nothing tells to be one."""
    if candidates.is_sequence(module):
        first, _, last = module._modules
        return () if candidates.misfit(module, (first, last)) else (first, last)
    found = (names for names in LIKELY if has_children(module, names) and not candidates.misfit(module, names))
    return next((names for names in found if all(isinstance(module.get_submodule(n), nn.Linear) for n in names)), ())


def _about_unknown(unknown: list[tuple[str, tuple[str, ...]]], told: list[tuple[str, ...]]) -> str:
    """A sentence about modules of unknown classes, with the call that tries them; "" if there are none."""
    if not unknown:
        return ""
    groups = list(dict.fromkeys([*told, *(names for _, names in unknown)]))
    given = str(groups[0] if len(groups) == 1 else groups).replace("'", '"')
    return (
        f"modules of classes that are not known by name stay as they are: {len(unknown)}, the first {unknown[0][0]}; "
        f"sparsify_(model, names={given}) tries them"
    )


def _told(names: Any) -> list[tuple[str, ...]]:
    """``names`` as a list of tuples of two or three names."""
    if names is None:
        return []
    listed = list(names) if isinstance(names, (tuple, list)) else []
    groups = [listed] if all(isinstance(name, str) for name in listed) else listed
    told = [tuple(group) for group in groups if isinstance(group, (tuple, list))]
    wrong = (len(group) not in (2, 3) or not all(isinstance(n, str) for n in group) for group in told)
    if len(told) < max(len(groups), 1) or any(wrong):
        raise ValueError(
            "sparsify_: names must be the names of a layer's projections, (gate, up, down), (up, down) or (gate and "
            f"up in one, down), or several such, got {names!r}"
        )
    return told


def _with_activation(candidate: Candidate, of: Activation | None, wanted: str | None) -> Candidate:
    """The candidate with the activation that its layer will have; ``of`` is its own, if it is of the family."""
    if candidate.kind == "pair" and candidate.attribute is None and wanted is not None:
        raise ValueError(
            f"sparsify_: {label(candidate.name, candidate.module)} must have its activation as an attribute for "
            f'activation="{wanted}", got one in the code of its forward; {LEAVE_OUT}'
        )
    if candidate.steps:
        return candidate
    if of is not None and wanted in (None, of.name):
        return candidate._replace(activation=of, was=None)
    if candidate.stored:
        raise ValueError(
            f"sparsify_: {label(candidate.name, candidate.module)} must be trained with another activation, and so be "
            f"in 16 bits, got weights in e4m3: load the model with dequantize=True; {LEAVE_OUT}"
        )
    if wanted == "drelu" and not candidate.form.gated:
        raise ValueError(
            f'sparsify_: {label(candidate.name, candidate.module)} must have a gate for activation="drelu", got '
            f"{' and '.join(candidate.form.children)}; {LEAVE_OUT}"
        )
    return candidate._replace(activation=Activation(str(wanted)))


def apply(model: nn.Module, planned: Plan, compression: int, strategy: Strategy) -> None:
    """Replace the candidates of ``planned``."""
    for candidate in planned.candidates:
        put(candidate, {"compression": compression, "strategy": strategy})
    for parent in model.modules():
        if isinstance(parent, nn.TransformerEncoder) and any(
            isinstance(getattr(layer, "linear2", None), SparseDown) for layer in parent.layers
        ):
            # it would make a nested tensor of a padded batch, for the fast path of its layers
            parent.use_nested_tensor = False
    if wide := {candidate.layer: why for candidate in planned.candidates if (why := candidate.dequantised)}:
        first = next(iter(wide))
        logger.warning(
            "layers in e4m3 whose weights were dequantised to bfloat16, in which they run: %d, the first %s, as %s",
            *(len(wide), first, wide[first]),
        )
    if any(candidate.stored for candidate in planned.candidates):
        quantised.settle(model)
    if planned.candidates:
        first = planned.candidates[0].layer or "the model"
        logger.info("layers taken: %d, the first %s", len(planned.candidates), first)
    if planned.unknown:
        logger.warning("%s", planned.unknown)
    if planned.remarks:
        logger.info("%s", "; ".join(planned.remarks[:3]))
    if changed := [candidate for candidate in planned.candidates if candidate.was is not None]:
        new = NAMES_OF_FAMILY[changed[0].activation.name]
        were = " and ".join(sorted({str(candidate.was) for candidate in changed}))
        logger.info("%s replaces %s; layers that need training before use: %d", new, were, len(changed))


def put(candidate: Candidate, options: dict[str, Any]) -> None:
    """Put the layer of a candidate in its place, of these settings."""
    module, options = candidate.module, options | candidate.activation.options()
    names, attribute, dropouts = candidate.form.children, candidate.attribute, candidate.dropouts
    if candidate.stored and not candidate.dequantised:
        made = quantised.layer(candidate.stored, candidate.kind == "pair", options)  # type: ignore[arg-type]
        if candidate.kind == "pair":
            put_pair(module, names, attribute, dropouts, made)
        else:
            made.dropped = candidate.dropped
            converted.turn(module, made)
        return
    for name, projection in candidate.stored.items():
        if projection is not None:
            module.set_submodule(name, projection.plain())
    if candidate.kind == "pair":
        pair_up(module, names, attribute, dropouts, options, candidate.casts)
    else:
        converted.turn(module, _replacement(candidate, options))


def _replacement(candidate: Candidate, options: dict[str, Any]) -> nn.Module:
    module, (names, fused) = candidate.module, candidate.form
    made: SparseFFN
    linears: Any = [candidate.plain.get(name) or module.get_submodule(name) for name in names]
    gated, k, n = candidate.shape
    if fused:
        made = converted.FusedGatedMLP(names, linears, fused == "up first", **options)
    elif candidate.steps:
        made = converted.GivenGatedMLP(type(module), candidate.steps, k, n, device="meta", **options)
    elif names in (GATED, PLAIN):
        made = (SparseGatedMLP if gated else SparseMLP)(k, n, device="meta", **options)
    else:
        made = (converted.NamedGatedMLP if gated else converted.NamedMLP)(names, linears, **options)
    made._modules.update(zip(names, linears))
    beside = (*candidate.plain, *candidate.dropouts, *(step for step in candidate.steps if step in module._modules))
    still = [n for n, m in module._modules.items() if type(m) is nn.Dropout and n not in beside]
    made._modules.update({name: module._modules[name] for name in (*beside, *still)})
    made._still = (*still, *(key for key, p in vars(module).items() if p == 0.0 and candidates.is_share(key, p)))
    made._linears = tuple(own_code(linear) for linear in linears if type(linear).forward is not nn.Linear.forward)
    made._casts = candidate.casts
    made._dropout = "".join(candidate.dropouts)
    if type(module) is nn.Sequential:
        # its children, which code may take from it, stay what they compute
        parts = {**module._modules, **made._modules}
        if candidate.was is not None:
            parts[str(candidate.attribute)] = converted.Applied(candidate.activation).train(module.training)
        made._modules = {key: parts[key] for key in module._modules}
    return made


def _require_reachable(model: nn.Module, taken: list[Candidate]) -> None:
    """Raise ValueError if something would still run a replaced activation or use an old down weight."""
    # the code of such a module computes with children that it has as a layer, too, but with its old activation
    coded = {id(c.module): c for c in taken if c.kind == "layer" and c.was is not None and c.attribute is None}
    for kept in gc.get_referrers(*(c.module for c in coded.values())) if coded else ():
        if isinstance(kept, types.MethodType) and id(kept.__self__) in coded and not of_torch(kept.__func__):
            held = coded[id(kept.__self__)]
            if kept is not vars(held.module).get("_old_forward"):
                raise ValueError(
                    f"{label(held.name, held.module)} must be called as a module, but its method "
                    f"{kept.__name__} is kept elsewhere, and would still apply {held.was}; {LEAVE_OUT}"
                )
    own: Any = [(c, c.module.get_submodule(c.form.down)) for c in taken if c.form.down not in c.plain]
    weights = {down.weight.untyped_storage()._cdata: (c, down.weight) for c, down in own}
    for name, owner in model.named_modules():
        if "_fsdp_wrapped_module" in owner._modules and {id(c.module) for c in taken} & set(map(id, owner.modules())):
            raise ValueError(
                f"{label(name, owner)} has its parameters in one buffer: call sparsify_ before FullyShardedDataParallel"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if type(tensor) not in (Tensor, nn.Parameter):
            continue
        candidate, weight = weights.get(tensor.untyped_storage()._cdata, (None, tensor))
        if candidate is not None and tensor is not weight and shared({"": tensor}, {"w": weight}):
            raise ValueError(
                f"{label(candidate.name, candidate.module)} must have a down weight of its own or share the "
                f"nn.Parameter itself, got one that shares memory with {name}, which another layout would end; "
                f"{LEAVE_OUT}"
            )


def _explain_activation(candidate: Candidate) -> str:
    return (
        f"sparsify_: {label(candidate.name, candidate.module)} must apply ReLU, got {candidate.was}. The kernels skip "
        "neurons that ReLU and its family (squared ReLU, dReLU, FATReLU) set to zero; SiLU, GELU and the like make "
        "values small, not zero, and the kernels compute no other activation. Train the model further with FATReLU or "
        "ReLU first, as examples/relufy.py of twell's repository does (arXiv 2310.04564, ReLU Strikes Back; "
        f'twell.recipe adds the L1 term that makes it sparse). To do that yourself, pass activation="relu"; {LEAVE_OUT}'
    )


def _nothing_found(model: nn.Module, planned: Plan) -> str:
    text = (
        "sparsify_: model must have feed-forward layers of nn.Linear projections, of a class that is known by name or "
        f"with their names in names=; got {type(model).__name__} without any"
    )
    if planned.left:
        text += (
            f" that filter_fn accepts; it left out {len(planned.left)}, the first {planned.left[0] or 'the model'!r}"
        )
    if already := named_layers(model):
        text += f"; {len(already)} layers of twell are there already, as {next(iter(already)) or 'the model itself'!r}"
    if planned.unknown:
        text += f"; {planned.unknown}"
    return "; ".join([text, *planned.remarks[:3]])
