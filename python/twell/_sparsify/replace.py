"""``sparsify_``: plan which modules of a model are replaced, then replace all of them or none."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from twell import tuning
from twell._activation import NAMES_OF_FAMILY, Activation
from twell._down_layout import unlisted
from twell._runtime import geometry
from twell._runtime.log import logger
from twell._sparsify.candidates import (
    CERTAIN,
    LEAVE_OUT,
    TELLTALES,
    Candidate,
    Found,
    between_fitting,
    examine,
    forms_of,
    holds_stacked_experts,
    label,
    label_between,
    outside_layers,
    unfit_sizes,
)
from twell._sparsify.modules import (
    GATED,
    PLAIN,
    Block,
    DeferredUp,
    FusedGatedMLP,
    HandOn,
    NamedGatedMLP,
    NamedMLP,
    PairMLP,
    SparseDown,
    plain,
)
from twell._sparsify.pairs import calls_parts
from twell.functional import Strategy
from twell.nn import SparseGatedMLP, SparseMLP

Filter = Callable[[nn.Module, str], bool]
Names = Sequence[str] | Sequence[Sequence[str]]

# What another activation may be replaced with; the threshold of fatrelu must be chosen first.
_TARGETS = ("relu", "relu2", "drelu")

_STACKED = (
    "experts whose weights are stacked in one tensor stay as they are, since each gets few tokens and the kernels take "
    "the weights of one layer"
)


class Plan(NamedTuple):
    """The candidates for ``apply``, the names that ``filter_fn`` left out, and modules that hold stacked experts."""

    candidates: list[Candidate]
    left: list[str]
    stacked: list[str]


def sparsify_(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    activation: Literal["relu", "relu2", "drelu"] | None = None,
    compression: int = 8,
    strategy: Strategy = "auto",
    names: Names | None = None,
) -> list[str]:
    """Run the feed-forward layers of ``model`` that have ReLU, or another activation of its family, through twell.

    In place. The activations are relu, relu2 (squared), drelu and fatrelu, with its threshold. Layers are found by the
    names of ``nn.Linear`` children, wherever they are in ``model``:

    - gate, up [N, K] and down [K, N]: ``gate_proj``, ``up_proj``, ``down_proj`` as in Llama; ``w1``, ``w3``, ``w2``;
      ``wi_0``, ``wi_1``, ``wo``; or gate and up in one [2 N, K], ``gate_up_proj`` as in Phi-3, read as two views. The
      module becomes a ``twell.nn.SparseGatedMLP`` with the same children.
    - up and down: ``up_proj``, ``down_proj`` as in Nemotron; ``dense_h_to_4h``, ``dense_4h_to_h``; ``wi``, ``wo``;
      ``c_fc``, ``c_proj``; ``linear1``, ``linear2`` and others. The module becomes a ``twell.nn.SparseMLP``.
    - a pair of them among the other children of a block, as ``fc1`` and ``fc2`` of OPT; ``linear1`` and ``linear2`` of
      ``nn.TransformerEncoderLayer``, which then leaves its fast path; two layers around an activation in an
      ``nn.Sequential``; and every module of ``fc1`` and ``fc2``. The module stays; the first layer passes its input to
      the second, which does the work of both, and the activation becomes an identity. Hooks on these three see that.

    The page on models has a table of architectures. Parameters stay the same objects, stored as they were, and state
    dicts keep their keys, so optimizers, checkpoints and tied weights hold. Projections that become other objects, in
    pairs and of classes of their own, keep the attributes that were set on them. In inference on a GPU a layer stores
    its down weight by rows while nothing else holds it (``twell.nn.set_down_layout``). A module used in
    several places is replaced once, in all of them. Experts that are modules count as layers; experts stacked in one
    tensor stay as they are, which is logged.

    A candidate must compute exactly the function named, with its gradients. Its ``forward`` runs beside the formula on
    small random weights, in float64, in the model's dtype and under autocast, in training and in evaluation, with and
    without gradients, for one token and for several, at ordinary and at extreme magnitudes. It may run only the
    operators of linear layers, the activation and one product. The rule for all Python code in these runs that is not
    torch's, decorators and helpers included: it reads no attributes and globals except for children, functions and
    constants (sizes, a dropout of 0, the threshold, None), sets none, branches only on conditions that the runs vary
    (modes, dtypes, up to five leading dimensions), enters no autocast, and calls only Python and torch. The model's own
    tensors are neither read nor needed, so it may be on ``meta``. For a pair within a block the source of the block's
    class is read, and the block runs on meta tensors if x is its only input.

    Code outside of a candidate is not seen: code that calls ``fc1`` of a block, gives ``forward`` other inputs than x,
    keeps a reference to a module outside of ``model``, or later changes the settings of one of torch's activations. An
    ``nn.Sequential`` must be called as a whole, since its single layers and slices give other values than before: if
    the class of the module that has it calls what it takes from it by index or in a loop, it is refused; such calls
    elsewhere are not seen.

    What is later put around, in place of or between ``fc1`` and ``fc2`` of a pair, dropout and layers of other pairs
    among it, raises in eager mode if it would change the result. So does any wrapper around ``fc1`` or ``fc2`` that is
    not torch's, and an identity in place of the activation leaves the activation on. Tracing of a graph looks at the
    children of the block and at its dropouts, and where one may change the result it raises with ``fullgraph=True`` and
    runs the block eagerly without. It does not see hooks, a new ``forward`` of a block, or, where ``fc1`` and ``fc2``
    are compiled apart, as happens to a block that does not fit into a graph, changes of one block when another has been
    compiled.

    Args:
        model: any module that contains such layers; for a model of transformers see
            ``twell.integrations.transformers.sparsify``, which also keeps its configuration right.
        filter_fn: called with each candidate and its qualified name; False leaves the candidate as it is.
        activation: None keeps each layer's own and refuses candidates with none of the family. Another replaces what
            differs and logs that: the model then computes another function and is of use only after training. "drelu"
            needs gates.
        compression, strategy: of every layer, as in ``twell.sparse_gated_ffn``. With "auto" each chooses for itself.
        names: of the children, where they are others: (gate, up, down), (up, down) or (gate and up in one, down), or a
            list of such tuples.

    Returns the qualified names of the new twell layers, in the order of ``named_modules``. These are the keys of
    ``layers`` and the names that ``twell.explain`` shows.

    Raises TypeError or ValueError and changes nothing: if nothing is found; if a candidate computes something else, has
    further children or state, hooks, methods of ``nn.Module`` overridden, projections that are not plain ``nn.Linear``
    (quantised, adapted, sharded), or sizes that the kernels do not take (multiples of 8, K up to 16,384 and N up to
    65,536); or if ``model`` is itself a module to replace.
    """
    tuning.require_strategy(strategy)
    geometry.words_per_tile(compression)
    return apply(model, plan(model, filter_fn, activation, strategy, names), compression, strategy)


def layers(model: nn.Module) -> dict[str, SparseGatedMLP | SparseMLP]:
    """All twell layers of ``model`` by qualified name: gated, non-gated, and ``fc2`` of the pairs of OPT-like blocks.

    Each is listed once, under its first name; "" is the model itself.
    """
    with unlisted():
        return {name: m for name, m in model.named_modules() if isinstance(m, (SparseGatedMLP, SparseMLP))}


def block_of(name: str, layer: nn.Module) -> str:
    """The name of the module around the activation that a twell layer took over: itself, or the block of a pair."""
    if not isinstance(layer, SparseDown):
        return name
    up: Any = layer.up_proj
    return name.removesuffix(up._block.names[1]).removesuffix(".")


def plan(
    model: nn.Module, filter_fn: Filter | None, activation: str | None, strategy: str, names: Names | None = None
) -> Plan:
    """Plan ``sparsify_``: the same checks and errors, without any change."""
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
    told = _told(names)
    candidates: list[Candidate] = []
    left: list[str] = []
    stacked: list[str] = []
    misses: dict[str, str] = {}
    examined: dict[Any, Found] = {}
    for name, module in outside_layers(model):
        forms = forms_of(module, told)
        if not forms:
            if holds_stacked_experts(module):
                stacked.append(label(name, module))
            elif between := between_fitting(module):
                misses.setdefault("Sequential", label_between(name, module, between))
            elif sizes := unfit_sizes(module):
                misses.setdefault("Sequential", f"{label(name, module)} with linear layers from {sizes}")
            elif found := TELLTALES & (module._modules.keys() | module._parameters.keys()):
                misses.setdefault(type(module).__name__, f"{label(name, module)} with {', '.join(sorted(found))}")
        elif filter_fn is not None and not filter_fn(module, name):
            left.append(name)
        else:
            for form in forms:
                candidate, of = examine(name, module, form, strategy, examined)
                if of is None and type(module) is nn.Sequential:
                    # what lies between two linear layers need not be an activation
                    misses.setdefault("Sequential", label_between(name, module, str(candidate.was)))
                    continue
                if of is None and activation is None:
                    raise ValueError(_explain_activation(candidate))
                candidates.append(_with_activation(candidate, of, activation))
    if not candidates:
        raise ValueError(_nothing_found(model, told, left, misses, stacked))
    _require_reachable(model, candidates)
    _require_whole(model, candidates)
    if candidates[0].name == "" and candidates[0].kind != "pair":
        ours = "SparseGatedMLP.from_linear" if candidates[0].form.gated else "SparseMLP.from_linear"
        raise ValueError(
            "sparsify_: model must contain the layers to replace, but is itself one, which cannot be replaced in "
            f"place: got {type(model).__name__}; make a layer of its projections with twell.nn.{ours}"
        )
    return Plan(candidates, left, stacked)


def _told(names: Any) -> list[tuple[str, ...]]:
    """``names`` as a list of tuples of two or three names."""
    if names is None:
        return []
    groups = [names] if not isinstance(names, str) and all(isinstance(name, str) for name in names) else names
    told = [] if isinstance(groups, str) else [tuple(group) for group in groups if not isinstance(group, str)]
    if not told or any(len(group) not in (2, 3) or not all(isinstance(n, str) for n in group) for group in told):
        raise ValueError(
            "sparsify_: names must be the names of a layer's projections, (gate, up, down), (up, down) or (gate and "
            f"up in one, down), or several such, got {names!r}"
        )
    return told


def _with_activation(candidate: Candidate, of: Activation | None, wanted: str | None) -> Candidate:
    """The candidate with the activation that its layer will have; ``of`` is its own, if it is of the family."""
    if of is not None and wanted in (None, of.name):
        return candidate._replace(activation=of, was=None)
    if wanted == "drelu" and not candidate.form.gated:
        raise ValueError(
            f'sparsify_: {label(candidate.name, candidate.module)} must have a gate for activation="drelu", got '
            f"{' and '.join(candidate.form.children)}; {LEAVE_OUT}"
        )
    return candidate._replace(activation=Activation(str(wanted)))


def apply(model: nn.Module, planned: Plan, compression: int, strategy: Strategy) -> list[str]:
    """Replace the candidates of ``planned`` and return the names of the new layers."""
    replacements: dict[int, nn.Module] = {}
    for candidate in planned.candidates:
        module, options = candidate.module, {"compression": compression, "strategy": strategy}
        if candidate.kind == "pair":
            _pair_up(candidate, options)
        else:
            replacements[id(module)] = _replacement(candidate, options).train(module.training)
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is not None and id(child) in replacements:
                parent._modules[key] = replacements[id(child)]
        if isinstance(parent, nn.TransformerEncoder) and any(
            isinstance(getattr(layer, "linear2", None), SparseDown) for layer in parent.layers
        ):
            # it would make a nested tensor of a padded batch, for the fast path of its layers
            parent.use_nested_tensor = False
    if planned.stacked:
        logger.info("%s: %s", _STACKED, ", ".join(planned.stacked[:3]))
    if changed := [candidate for candidate in planned.candidates if candidate.was is not None]:
        new = NAMES_OF_FAMILY[changed[0].activation.name]
        were = " and ".join(sorted({str(candidate.was) for candidate in changed}))
        logger.info("%s replaces %s; layers that need training before use: %d", new, were, len(changed))
    return [candidate.layer for candidate in planned.candidates]


def _replacement(candidate: Candidate, options: dict[str, Any]) -> nn.Module:
    module, (names, fused) = candidate.module, candidate.form
    linears: Any = [module.get_submodule(name) for name in names]
    if candidate.kind == "whole":
        return PairMLP(*_pair(candidate, options))
    options = {**options, **candidate.activation.options()}
    if fused:
        return FusedGatedMLP(names, linears, fused == "up first", **options)
    linears = [plain(linear) for linear in linears]
    made: nn.Module
    if names == GATED:
        made = SparseGatedMLP.from_linear(*linears, **options)
    elif names == PLAIN:
        made = SparseMLP.from_linear(*linears, **options)
    else:
        return (NamedGatedMLP if len(names) == 3 else NamedMLP)(names, linears, **options)
    made._modules.update(zip(names, linears))
    return made


def _pair_up(candidate: Candidate, options: dict[str, Any]) -> None:
    module, names, attribute = candidate.module, candidate.form.children, candidate.attribute
    assert attribute is not None
    up, down = _pair(candidate, options)
    for name, new in zip((*names, attribute), (up, down, HandOn(up).train(module.training))):
        holder, _, key = name.rpartition(".")
        setattr(module.get_submodule(holder), key, new)
    up._block = Block(module, names, (attribute, *candidate.dropouts))
    if isinstance(module, nn.TransformerEncoderLayer):
        # else its fast path for inference would read the weights and run dense
        module.activation_relu_or_gelu = 0


def _pair(candidate: Candidate, options: dict[str, Any]) -> tuple[DeferredUp, SparseDown]:
    first, second = map(candidate.module.get_submodule, candidate.form.children)
    up = DeferredUp()
    up._share(first)  # type: ignore[arg-type]
    return up, SparseDown(up, second, **options, **candidate.activation.options())  # type: ignore[arg-type]


def _require_reachable(model: nn.Module, candidates: list[Candidate]) -> None:
    """Raise ValueError if something in ``model`` would still use a replaced module or an old down weight."""
    replaced = {id(c.module): c for c in candidates if c.kind != "pair"}
    weights = {_down(c).weight.untyped_storage()._cdata: (c, _down(c).weight) for c in candidates}
    for name, owner in model.named_modules():
        where = label(name, owner)
        compiled = owner._modules.get("_orig_mod")
        if id(compiled) in replaced or (owner._compiled_call_impl is not None and id(owner) in replaced):
            raise ValueError(f"{where} was compiled and would still run the old module: compile it after sparsify_")
        if "_fsdp_wrapped_module" in owner._modules and {id(c.module) for c in candidates} & set(
            map(id, owner.modules())
        ):
            raise ValueError(
                f"{where} has its parameters in one buffer: call sparsify_ before FullyShardedDataParallel"
            )
        for key, value in vars(owner).items():
            if key != "_modules" and (found := _first_held(value, replaced)):
                raise ValueError(
                    f"{label(found.name, found.module)} must be reached by names of children alone, but {where} has "
                    f"it in {key}, too, and would still run the old module; {LEAVE_OUT}"
                )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if type(tensor) not in (Tensor, nn.Parameter):
            continue
        candidate, weight = weights.get(tensor.untyped_storage()._cdata, (None, tensor))
        if candidate is not None and tensor is not weight and _overlap(tensor, weight):
            raise ValueError(
                f"{label(candidate.name, candidate.module)} must have a down weight of its own or share the "
                f"nn.Parameter itself, got one that shares memory with {name}, which another layout would end; "
                f"{LEAVE_OUT}"
            )


def _require_whole(model: nn.Module, candidates: list[Candidate]) -> None:
    """Raise ValueError if code of ``model`` calls single layers of an ``nn.Sequential`` that has a pair."""
    sequences = {id(c.module): c for c in candidates if type(c.module) is nn.Sequential}
    for where, owner in model.named_modules() if sequences else ():
        for key, child in owner._modules.items():
            if (candidate := sequences.get(id(child))) and (reason := calls_parts(owner, key)):
                raise ValueError(
                    f"{label(candidate.name, candidate.module)} must be called as a whole, since its first layer "
                    f"returns its input and its second does the work of both, but {label(where, owner)} may need what "
                    f"is between them: its {reason}; {LEAVE_OUT}"
                )


def _down(candidate: Candidate) -> Any:
    return candidate.module.get_submodule(candidate.form.down)


def _first_held(value: Any, wanted: dict[int, Candidate], depth: int = 5) -> Candidate | None:
    """The first of the modules ``wanted`` that a value, a container, method or function, refers to."""
    if isinstance(value, nn.Module):
        return wanted.get(id(value))
    if depth == 0 or isinstance(value, (str, Tensor, type)):
        return None
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = value
    elif isinstance(value, types.MethodType):
        inner = (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        inner = (value.func, value.args, value.keywords)
    elif isinstance(value, types.FunctionType):
        cells = (cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())
        inner = itertools.chain(cells, value.__defaults__ or (), (value.__kwdefaults__ or {}).values())
    found = (_first_held(item, wanted, depth - 1) for item in inner)
    return next((candidate for candidate in found if candidate is not None), None)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage share memory."""
    spans = []
    for t in (a, b):
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride())) if t.numel() else -1
        begin = t.storage_offset() * t.element_size()
        spans.append((begin, begin + (last + 1) * t.element_size()))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]


def _explain_activation(candidate: Candidate) -> str:
    return (
        f"sparsify_: {label(candidate.name, candidate.module)} must apply ReLU, got {candidate.was}. The kernels skip "
        "neurons that ReLU and its family (squared ReLU, dReLU, FATReLU) set to zero; SiLU, GELU and the like make "
        "values small, not zero, and the kernels compute no other activation. Train the model further with FATReLU or "
        "ReLU first, as examples/relufy.py of twell's repository does (arXiv 2310.04564, ReLU Strikes Back; "
        f'twell.recipe adds the L1 term that makes it sparse). To do that yourself, pass activation="relu"; {LEAVE_OUT}'
    )


def _nothing_found(
    model: nn.Module,
    told: list[tuple[str, ...]],
    left: list[str],
    misses: dict[str, str],
    stacked: list[str],
) -> str:
    *forms, last = (f"({', '.join(form)})" for form in CERTAIN)
    text = (
        "sparsify_: model must have modules whose projections are nn.Linear children of known names, such as "
        f"{', '.join(forms)} or {last}, or of the names in names=; got {type(model).__name__} without any"
    )
    if left:
        text += f" that filter_fn accepts; it left out {len(left)}, the first {left[0] or 'the model'!r}"
    if told:
        text += f"; names= is {'; '.join(', '.join(names) for names in told)}"
    if already := layers(model):
        text += f"; {len(already)} layers of twell are there already, as {next(iter(already)) or 'the model itself'!r}"
    if stacked:
        text += f"; {stacked[0]}: {_STACKED}"
    if misses:
        text += "; nearest are " + "; ".join(list(misses.values())[:5])
        text += (
            ": only nn.Linear projections are recognised, in an nn.Sequential only from K to N to K with ReLU or "
            "another of its family alone between them, and other names only if names= tells them; or call "
            "twell.sparse_gated_ffn"
        )
    return text
