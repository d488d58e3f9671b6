"""Neurons that never fire: count firing, remove dead neurons from a layer.

A neuron whose gate is zero adds exactly nothing, and without it the gate GEMM, the one product that sparsity does not
skip, is smaller. "Never fired on this data" is not "cannot fire": nothing is removed unless asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell.base.activation import activation_of
from twell.call.plain import cast
from twell.nn.down_layout import unlisted
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.nn.models import named_layers
from twell.runtime import modes

MLP = SparseGatedMLP | SparseMLP
Module = TypeVar("Module", bound=nn.Module)

# The kernels take multiples of 8 neurons.
_STEP = 8

# Gates computed at a time while counting: 32 MB of 16 bits, and as much spill.
CHUNK_GATES = 1 << 24


@dataclass(frozen=True, eq=False)
class Firing:
    """How often each of N neurons fired, and over how many tokens.

    totals: int64 [N + 1], the N counts and then the tokens; those of several runs or ranks are their sum.
    """

    totals: Tensor

    @property
    def counts(self) -> Tensor:
        """The tokens for which the gate of each neuron was not zero, int64 [N]."""
        return self.totals[:-1]

    @property
    def tokens(self) -> int:
        """All tokens seen. Waits for the device."""
        return int(self.totals[-1])

    def alive(self, minimum: int = 1) -> Tensor:
        """bool [N]: the neurons that fired at least ``minimum`` times."""
        return self.counts >= minimum

    def __repr__(self) -> str:
        if self.totals.is_meta:
            return f"Firing({len(self.counts)} neurons on meta)"
        return f"Firing({int(self.alive().sum()):,} of {len(self.counts):,} neurons in {self.tokens:,} tokens)"


@contextmanager
def count_firing(model: nn.Module) -> Iterator[dict[str, Firing]]:
    """Count how often each neuron of the twell layers of ``model`` fires, in every call inside the ``with``.

    ``model`` may itself be such a layer, whose name is "". A neuron fires for a token if its gate, after ReLU and
    rounding to 16 bits, is not zero. PyTorch computes the gate once more for this; kernels may differ where the order
    of summation decides whether a gate is zero. A projection that is more than its weight, as an adapter is, is called
    a second time: its dropout draws another mask, and its batch norm sees the tokens twice.

    Works with and without gradients and under autocast, and never waits for the device. Recomputation by activation
    checkpointing is not counted. Counts, on the device of each layer, which must not move, can be read at any time.

    Counting uses hooks, which a model compiled before may not run, and which ``fullgraph=True`` refuses: call the
    original, or compile inside. Register pre-hooks that change a layer's input before this call, and pickle models
    outside the ``with``. Raises ValueError if there is no twell layer.
    """
    layers = named_layers(model)
    if not layers:
        raise ValueError(f"count_firing: the model must have SparseGatedMLP or SparseMLP layers, got {_kind(model)}")
    firing = dict[str, Firing]()
    with ExitStack() as handles:
        for name, mlp in layers.items():
            weight = gate_of(mlp).weight
            totals = torch.zeros(weight.shape[0] + 1, dtype=torch.int64, device=weight.device)
            handles.enter_context(mlp.register_forward_pre_hook(_counter(mlp, totals), with_kwargs=True))
            firing[name] = Firing(totals)
        yield firing


def _counter(owner: MLP, totals: Tensor) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    # a graph ends here, and goes on behind it
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("x")
        # a copy of the layer has this hook, too; the layer itself refuses an x that is no tensor
        if module is owner and isinstance(x, Tensor) and not modes.in_backward():
            count_call(owner, x, totals)

    return count  # type: ignore[no-any-return]


@torch.no_grad()
def count_call(mlp: MLP, x: Tensor, totals: Tensor) -> None:
    """Add the non-zeros of the gate of x [..., K] to ``totals`` [N + 1], by neuron, and its tokens."""
    gate, plain, x = gate_of(mlp), mlp._is_plain(), whole(x)
    if x.dim() == 0 or x.shape[-1] != mlp.hidden or not x.is_floating_point() or not x.numel():
        # the layer itself refuses what it does not take
        return
    weight, bias = gate.weight, gate.bias
    if plain:
        # autocast may have ended meanwhile
        weight, bias = cast(map(whole, (weight, bias)), x.dtype)
    tokens, fired = x.reshape(-1, x.shape[-1]), torch.zeros_like(totals[:-1])
    # a checkpoint's recomputation does not count: it must find the products and random numbers of the layer alone
    with modes.unseen(), torch.random.fork_rng([x.device] * (x.is_cuda and not modes.capturing(x)), enabled=not plain):
        for chunk in torch.split(tokens, max(1, CHUNK_GATES // len(fired))):
            # the projection may be more than its weight: an adapter, say
            values = F.linear(chunk, weight, bias) if plain else mlp._gate(as_parameters(mlp, chunk))
            fired += (activation_of("fatrelu", mlp.threshold).after(values) != 0).sum(0)
    totals[:-1] += fired
    totals[-1] += tokens.shape[0]


def as_parameters(mlp: MLP, rows: Tensor) -> Tensor:
    """Rows, perhaps cast by an autocast that has ended, in the dtype of the parameters, unless autocast will choose."""
    if torch.is_autocast_enabled(rows.device.type):
        return rows
    return rows.to(next(p.dtype for p in (*gate_of(mlp).parameters(), *mlp.parameters()) if p.is_floating_point()))


class LayerCompaction(NamedTuple):
    """The result of ``compact`` for one layer.

    name: in ``named_modules`` of the module; "" for the module itself. neurons: N before. alive: how many of them are
    alive by the evidence. kept: N after, ``alive`` filled up to a multiple of 8. bytes_saved: of parameters.
    """

    name: str
    neurons: int
    alive: int
    kept: int
    bytes_saved: int

    def __str__(self) -> str:
        return (
            f"{self.name or 'module'}: {self.neurons:,} neurons, {self.alive:,} alive, {self.kept:,} kept, "
            f"{self.bytes_saved / 1e6:,.1f} MB saved"
        )


@dataclass(frozen=True)
class CompactionReport:
    """The result of ``compact``: a ``LayerCompaction`` for each layer, in the order of ``alive``."""

    layers: tuple[LayerCompaction, ...]
    neurons = property(lambda self: sum(layer.neurons for layer in self.layers), doc="Neurons before.")
    kept = property(lambda self: sum(layer.kept for layer in self.layers), doc="Neurons after.")
    bytes_saved = property(lambda self: sum(layer.bytes_saved for layer in self.layers), doc="Bytes of parameters.")

    def __str__(self) -> str:
        saved = f"{self.bytes_saved / 1e6:,.1f} MB saved"
        total = f"{self.kept:,} of {self.neurons:,} neurons kept in {len(self.layers)} layers, {saved}"
        return "\n".join([*map(str, self.layers), *([total] if len(self.layers) > 1 else [])])


class Compaction(nn.Module):
    """The record of a compacted layer, its child ``compaction``; computes nothing.

    kept: bool [N], a persistent buffer: the neurons of the original layer that are still there, so in a checkpoint.
    """

    kept: Tensor

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", kept)

    @property
    def neurons(self) -> Tensor:
        """int64 [N'], ascending: the index in the original layer of each neuron left. Waits for the device."""
        return self.kept.nonzero().flatten()


def compact(
    module: Module, alive: Tensor | Firing | Mapping[str, Tensor] | Mapping[str, Firing], *, inplace: bool = False
) -> tuple[Module, CompactionReport]:
    """Remove the neurons of ``module`` that are not alive; return the result and a report.

    The result is exact where no removed neuron would fire; elsewhere the terms of those neurons are missing. ``alive``
    holds for the data that it comes from.

    Args:
        module: a SparseGatedMLP, a SparseMLP, or any model with such layers, whatever ``sparsify_`` makes among them.
            A gate that the model's own code makes raises NotImplementedError.
        alive: for a layer its ``Firing``, whose neurons must have fired once, or bool [N] that is true for neurons to
            keep, on any device. For a model a mapping from names of layers, as in ``named_modules``, to these, as
            ``count_firing`` gives it; layers that it does not name stay as they are.
        inplace: change the layers of ``module`` itself and return it, not a copy.

    A compacted layer stays what it was except for N: class, ``strategy``, hooks and all else are kept, and neurons keep
    their order. Their parameters are new, on the same device, with the same ``requires_grad`` and no longer shared with
    other modules; gradients, ``main_grad`` and the state of an optimizer do not follow: make the optimizer afterwards.

    N stays a multiple of 8, so up to 7 neurons that are not alive are kept, the first ones. The gate GEMM's kernel
    gains for each 256 that N falls. Compacting again is possible.

    Each compacted layer gets a child ``compaction`` (see there) with ``kept``, bool [N], and ``neurons``, their
    original indices. To load its state dict into a fresh model, compact that with the masks first:
    ``twell.compact(fresh, {name: state[f"{name}.compaction.kept"]}, inplace=True)``.

    Waits for the device. Raises TypeError for wrong types of layers, evidence or masks, ValueError for masks of the
    wrong length, evidence from no tokens, layers without any neuron alive, names that the module does not have and
    layers that share a projection.
    """
    masks, reports = _plan(module, alive)
    # these become the parameters of modules that may be trained
    with torch.inference_mode(False), torch.no_grad():
        to = module if inplace else copy.deepcopy(module)
        for name, kept in masks.items():
            # one at a time: the memory of the old ones is free for the next
            _keep(to.get_submodule(name), kept.clone())
    return to, CompactionReport(tuple(reports))


def whole(t: Any) -> Any:
    """The full tensor of a DTensor, as tensor parallelism makes, differentiably; others as they are."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def gate_of(mlp: MLP) -> nn.Linear:
    """The projection before ReLU."""
    return mlp.gate_proj if isinstance(mlp, SparseGatedMLP) else mlp.up_proj


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _plan(module: nn.Module, alive: object) -> tuple[dict[str, Tensor], list[LayerCompaction]]:
    """Check all arguments; return the mask of each layer to compact, by its first name, and the reports."""
    layers = named_layers(module)
    if not layers:
        raise TypeError(f"compact: module must be or have SparseGatedMLP or SparseMLP layers, got {_kind(module)}")
    if "" in layers and not isinstance(alive, Mapping):
        alive = {"": alive}
    if not isinstance(alive, Mapping):
        raise TypeError(f"compact: alive must map names of layers to Firing or bool tensors, got {_kind(alive)}")
    first = {mlp: name for name, mlp in layers.items()}
    with unlisted():
        every = {name: first.get(child) for name, child in module.named_modules(remove_duplicate=False)}
    masks, reports = {}, dict[str, LayerCompaction]()
    for name, evidence in alive.items():
        own = every.get(name)
        if own is None:
            known = ", ".join(map(repr, layers))
            raise ValueError(f"compact: alive must name layers of the module ({known}), got {name!r}")
        if own in reports:
            raise ValueError(f"compact: alive must name a layer once, got {reports[own].name!r} and {name!r}")
        if layers[own]._given:
            got = "one whose gate the model's own code makes, of all neurons perhaps"
            raise NotImplementedError(f"compact: {name or 'module'} must make its gate itself, got {got}")
        masks[own], reports[own] = _choose(layers[own], name, evidence)
    held = {name: {getattr(mlp, child) for child in mlp._projections} for name, mlp in layers.items()}
    for name in masks:
        for other in layers:
            if other != name and held[name] & held[other]:
                raise ValueError(f"compact: {name} must have projections of its own, got one that is {other}'s, too")
    return masks, list(reports.values())


def _choose(mlp: MLP, name: str, evidence: object) -> tuple[Tensor, LayerCompaction]:
    """The neurons to keep, bool [N] on the CPU, and the layer's report."""
    where, n = f"compact: alive of {name or 'module'}", mlp.intermediate
    if isinstance(evidence, Firing):
        if evidence.totals.shape != (n + 1,):
            raise ValueError(f"{where} must have counted its {n} neurons, got {_kind(evidence.counts)}")
        tensor = evidence.totals
    elif isinstance(evidence, Tensor) and evidence.dtype == torch.bool:
        if evidence.shape != (n,):
            raise ValueError(f"{where} must be bool [{n}], got {_kind(evidence)}")
        tensor = evidence
    else:
        raise TypeError(f"{where} must be bool [{n}] or Firing, got {_kind(evidence)}")
    if tensor.is_meta:
        raise ValueError(f"{where} must have values, got a tensor on meta")
    if isinstance(evidence, Firing):
        if not evidence.tokens:
            got = "counts of no tokens: the layer was not called, or only within a compiled module"
            raise ValueError(f"{where} must come from data, got {got}")
        tensor = evidence.alive()
    kept = tensor.to("cpu", copy=True)
    living = int(kept.sum())
    if not living:
        raise ValueError(f"{where} must have a neuron, got none of {n}: the layer adds nothing but its down bias")
    # fill with dead neurons
    left = living + min(-living % _STEP, n - living)
    kept[(~kept).nonzero().flatten()[: left - living]] = True
    bytes_saved = sum(p.nbytes // n for *_, p, _ in _neurons(mlp, name)) * (n - left)
    return kept, LayerCompaction(name, n, living, left, bytes_saved)


def _neurons(mlp: Any, name: str = "") -> list[tuple[nn.Linear, str, nn.Parameter, int]]:
    """Check and return the parameters of neurons: the projection, "weight" or "bias", itself, and the neurons' dim."""
    found = []
    for child in mlp._projections:
        linear, is_down = getattr(mlp, child), child == mlp._projections[-1]
        own = dict(linear.named_parameters())
        where = f"{name}.{child}".strip(".")
        if not isinstance(linear, nn.Linear) or own.keys() - {"bias"} != {"weight"}:
            got = f"{_kind(linear)} with {sorted(own)}"
            raise TypeError(f"{where} must be an nn.Linear with parameters weight and bias alone, got {got}")
        if any(hasattr(parameter, "full_tensor") for parameter in own.values()):
            raise TypeError(f"{where} must have plain parameters, got DTensors: compact before the model is sharded")
        found += [(linear, key, p, int(is_down)) for key, p in own.items() if not (is_down and key == "bias")]
    return found


def _keep(mlp: Any, kept: Tensor) -> None:
    """Leave a layer the neurons that are true in ``kept``, bool [N] on the CPU."""
    mlp._laid.put_back()
    index, before = kept.nonzero().flatten(), mlp._modules.get("compaction")
    # of weights that are one parameter, too
    made: dict[int, nn.Parameter] = {}
    parameters = _neurons(mlp)
    for linear, key, old, dim in parameters:
        # a gate and an up projection in one have each neuron twice
        parts: Tensor = old.unflatten(dim, (-1, mlp.intermediate))  # type: ignore[no-untyped-call]
        data = parts.index_select(dim + 1, index.to(old.device)).flatten(dim, dim + 1)
        if dim:
            data = data.t().contiguous().t() if mlp.down_layout == "rows" else data
            linear.in_features = len(index)
        else:
            linear.out_features = len(data)
        linear._parameters[key] = made.setdefault(id(old), nn.Parameter(data, old.requires_grad))
    mlp.intermediate = len(index)
    if isinstance(before, Compaction):
        # of the original neurons
        original = before.kept.cpu()
        kept = original.masked_scatter(original, kept)
    mlp.compaction = Compaction(kept.to(mlp.down_proj.weight.device)).train(mlp.training)
