"""Neurons that never fire: count firing, remove dead neurons from a layer, put them back.

A neuron whose gate is zero adds exactly nothing. Without it a layer computes the same function wherever it would not
have fired, and the gate GEMM, the one product that sparsity does not skip, is smaller. "Never fired on this data" is
not "cannot fire": nothing is removed unless asked for, and all of it can be put back.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from twell.base.activation import activation_of
from twell.call import admission, functional
from twell.call.plain import cast
from twell.choose.plan import PACKED_DTYPES
from twell.nn.down_layout import unlisted
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.runtime import geometry, modes

MLP = SparseGatedMLP | SparseMLP
Module = TypeVar("Module", bound=nn.Module)

# The kernels take multiples of 8 neurons.
_STEP = 8

# Gates computed at a time while counting: 32 MB of 16 bits, and as much spill.
CHUNK_GATES = 1 << 24


@dataclass(frozen=True, eq=False)
class Firing:
    """How often each of N neurons fired, and over how many tokens.

    totals: int64 [N + 1], the N counts and then the tokens. Evidence is merged by adding: runs by ``+``, ranks by an
        all-reduce.
    """

    totals: Tensor

    @property
    def counts(self) -> Tensor:
        """int64 [N]: the tokens for which a neuron's gate was not zero."""
        return self.totals[:-1]

    @property
    def tokens(self) -> int:
        """All tokens seen. Waits for the device."""
        return int(self.totals[-1])

    def alive(self, minimum: int = 1) -> Tensor:
        """bool [N]: the neurons that fired at least ``minimum`` times."""
        return self.counts >= minimum

    def __add__(self, other: Firing) -> Firing:
        if not isinstance(other, Firing):
            return NotImplemented
        if self.totals.shape != other.totals.shape:
            neurons = len(self.counts), len(other.counts)
            raise ValueError(f"both must have counted the same neurons, got {neurons[0]} and {neurons[1]}")
        return Firing(self.totals + other.totals.to(self.totals.device))

    def __repr__(self) -> str:
        if self.totals.is_meta:
            return f"Firing({len(self.counts)} neurons on meta)"
        return f"Firing({int(self.alive().sum()):,} of {len(self.counts):,} neurons in {self.tokens:,} tokens)"


class FiringCounts(dict[str, Firing]):
    """``Firing`` of each twell layer of a model, by the layer's name in ``named_modules``; "" is the model itself."""

    def __add__(self, other: FiringCounts) -> FiringCounts:
        """The evidence of both, which must be of the same layers; on the devices of the first."""
        if not isinstance(other, FiringCounts):
            return NotImplemented
        if self.keys() != other.keys():
            apart = ", ".join(map(repr, sorted(self.keys() ^ other.keys())))
            raise ValueError(f"both must have counted the same layers, got {apart} in one alone")
        return FiringCounts({name: firing + other[name] for name, firing in self.items()})

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> FiringCounts:
        """The sum over all ranks of ``group``, one collective per layer; itself if torch.distributed is not in use.

        Every rank must call it, with the same layers.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self
        merged = {name: Firing(firing.totals.clone()) for name, firing in self.items()}
        for firing in merged.values():
            dist.all_reduce(firing.totals, group=group)
        return FiringCounts(merged)

    def __repr__(self) -> str:
        return "\n".join(["FiringCounts", *(f"  {name or 'module'}: {firing}" for name, firing in self.items())])


@contextmanager
def count_firing(model: nn.Module) -> Iterator[FiringCounts]:
    """Count how often each neuron of the twell layers of ``model`` fires, in every call inside the ``with``.

    ``model`` may itself be such a layer. A neuron fires for a token if its gate, after ReLU and rounding to 16 bits, is
    not zero. The gate is computed once more for this, by the sparse kernel or, for layers with ``strategy="dense"``, by
    PyTorch; the two may differ where the order of summation decides whether a gate is zero. Works with and without
    gradients and under autocast, and never waits for the device. Recomputation by activation checkpointing is not
    counted. Counts are on the device of each layer, which must not move meanwhile, and can be read at any time.

    A projection that is more than its weight, as an adapter is, is called a second time: its dropout draws another
    mask, and its batch norm sees the tokens twice. Register pre-hooks that change a layer's input before this call.

    Counting uses hooks, which a model compiled before may not run: call the original, or compile inside. Pickle models
    outside the ``with``. Raises ValueError if there is no twell layer.
    """
    layers = _layers(model)
    if not layers:
        raise ValueError(f"count_firing: the model must have SparseGatedMLP or SparseMLP layers, got {_kind(model)}")
    firing, handles = {}, []
    try:
        for mlp, names in layers.items():
            weight = gate_of(mlp).weight
            totals = torch.zeros(weight.shape[0] + 1, dtype=torch.int64, device=weight.device)
            handles.append(mlp.register_forward_pre_hook(_counter(mlp, totals), with_kwargs=True))
            firing[names[0]] = Firing(totals)
        yield FiringCounts(firing)
    finally:
        for handle in handles:
            handle.remove()


def _counter(owner: MLP, totals: Tensor) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("x")
        # a copy of the layer has this hook, too; the layer itself refuses an x that is no tensor
        if module is not owner or not isinstance(x, Tensor):
            return
        if modes.compiling() or not modes.in_backward():
            count_call(owner, x, totals)

    return count


@torch.library.custom_op("twell_internal::add_counts", mutates_args=("totals",))
def _add_counts(totals: Tensor, fired: Tensor, tokens: int) -> None:
    """Add to ``totals`` unless a checkpoint recomputes, which a graph learns only when it runs."""
    if not modes.in_backward():
        totals[:-1] += fired
        totals[-1] += tokens


@torch.no_grad()
def count_call(mlp: MLP, x: Tensor, totals: Tensor) -> None:
    """Add the non-zeros of the gate of x [..., K] to ``totals`` [N + 1], by neuron, and its tokens."""
    name, gate, plain = "count_firing", gate_of(mlp), mlp._is_plain()
    if plain:
        # divided by tensor parallelism, say
        x, weight, bias = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (x, gate.weight, gate.bias))
        if x.is_floating_point():
            # autocast may have ended meanwhile
            weight, bias = cast([weight, bias], x.dtype)
        operands = admission.admit(name, x=x, w_gate=weight, b_gate=bias)
        x, weight, bias = operands["x"], operands["w_gate"], operands.get("b_gate")
    tokens, packs = x.reshape(-1, x.shape[-1]), plain and _packs(mlp, x)
    if not tokens.shape[0]:
        return
    fired = torch.zeros_like(totals[:-1])
    # chunks of equal size: a short one would run the few-token kernel
    for chunk in tokens.tensor_split(-(-tokens.shape[0] * len(totals[:-1]) // CHUNK_GATES)):
        if packs:
            threshold: Any = mlp.threshold
            values = functional.pack(chunk, weight, bias, compression=mlp.compression, threshold=threshold).unpack()
        else:
            # the projection may be more than its weight: an adapter, say
            values = F.linear(chunk, weight, bias) if plain else gate_by_call(mlp, chunk)
            values = activation_of("fatrelu", mlp.threshold).after(values)
        fired += (values != 0).sum(0)
    _add_counts(totals, fired, tokens.shape[0])


def gate_by_call(mlp: MLP, rows: Tensor) -> Tensor:
    """The gate [M, N] of rows [M, K] before its activation, by calling a projection that is more than a weight."""
    gate: Tensor = mlp._gate(as_parameters(mlp, rows))
    return gate


def as_parameters(mlp: MLP, rows: Tensor) -> Tensor:
    """Rows, perhaps cast by an autocast that has ended, in the dtype of the parameters, unless autocast will choose."""
    if torch.is_autocast_enabled(rows.device.type):
        return rows
    return rows.to(next(p.dtype for p in (*gate_of(mlp).parameters(), *mlp.parameters()) if p.is_floating_point()))


def _packs(mlp: MLP, x: Tensor) -> bool:
    """Whether the sparse kernel computes the gate, or may."""
    return x.dtype in PACKED_DTYPES and not mlp._runs_dense(mlp.down_proj.weight)


@dataclass(frozen=True)
class LayerCompaction:
    """The result of ``compact`` for one layer.

    name: in ``named_modules`` of the module; "" for the module itself. neurons: N before. alive: how many of them are
    alive by the evidence. kept: N after, ``alive`` filled up to a multiple of 8. bytes_saved: of parameters, on their
    device. evidence: in words. tokens: how many the evidence comes from, None for a mask.
    """

    name: str
    neurons: int
    alive: int
    kept: int
    bytes_saved: int
    evidence: str
    tokens: int | None

    @property
    def neurons_saved(self) -> float:
        """Removed share of the neurons, of their parameters and of the flops of dense products."""
        return 1 - self.kept / self.neurons

    @property
    def gate_saved(self) -> float:
        """Removed share of the gate GEMM, in tiles of 256 neurons, which its kernel computes whole."""
        return 1 - geometry.tiles(self.kept) / geometry.tiles(self.neurons)

    def __str__(self) -> str:
        return (
            f"{self.name or 'module'}: {self.neurons:,} neurons, {self.alive:,} alive, {self.kept:,} kept; "
            f"gate GEMM, in tiles of 256, {self.gate_saved:.1%} smaller, {self.bytes_saved / 1e6:,.1f} MB saved; "
            f"{self.evidence}"
        )


@dataclass(frozen=True)
class CompactionReport:
    """The result of ``compact``: a ``LayerCompaction`` for each layer, in the model's order."""

    layers: tuple[LayerCompaction, ...]
    # of all layers
    neurons = property(lambda self: sum(layer.neurons for layer in self.layers), doc="Neurons before.")
    kept = property(lambda self: sum(layer.kept for layer in self.layers), doc="Neurons after.")
    bytes_saved = property(lambda self: sum(layer.bytes_saved for layer in self.layers), doc="Bytes of parameters.")

    def __str__(self) -> str:
        total = (
            f"{self.kept:,} of {self.neurons:,} neurons kept in {len(self.layers)} layers, "
            f"{self.bytes_saved / 1e6:,.1f} MB saved"
        )
        return "\n".join([*map(str, self.layers), *([total] if len(self.layers) > 1 else [])])


class Compaction(nn.Module):
    """The record of a compacted layer, its child ``compaction``; computes nothing.

    kept: bool [N], a persistent buffer: True for neurons of the original layer that are still there. It says which
        neurons a checkpoint holds; ``compact`` takes it to make a fresh layer fit.
    removed: [N - N', C] on the CPU, a row per removed neuron with its weights and biases side by side, or None. Follows
        the module's dtype but not its device and is saved in the state dict. It is neither parameter nor buffer, so
        wrappers for many GPUs do not see it. Set it to None to drop it.
    """

    kept: Tensor
    removed: Tensor | None

    def __init__(self, kept: Tensor, removed: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("kept", kept)
        self.removed = removed

    @property
    def neurons(self) -> Tensor:
        """int64 [N'], ascending: the index in the original layer of each neuron left. Waits for the device."""
        return self.kept.nonzero().flatten()

    def extra_repr(self) -> str:
        left = "some" if self.kept.is_meta else f"{int(self.kept.sum())}"
        return f"{left} of {self.kept.numel()} neurons" + (", the others dropped" if self.removed is None else "")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Compaction:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.removed is not None:
            # shows the dtype and device of fn without moving all rows
            like = fn(self.removed.new_empty(0))
            if self.removed.is_meta or like.is_meta:
                device = "meta" if like.is_meta else "cpu"
                self.removed = torch.empty_like(self.removed, dtype=like.dtype, device=device)
            else:
                self.removed = self.removed.to(like.dtype)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.removed is not None:
            destination[prefix + "removed"] = self.removed

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *how: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *how)
        key, (*_, unexpected, _) = prefix + "removed", how
        if key in state_dict:
            if key in unexpected:
                unexpected.remove(key)
            removed = state_dict[key].detach()
            self.removed = removed if removed.is_meta else removed.to("cpu", copy=True)
        elif prefix + "kept" in state_dict:
            # the state is another model's, perhaps with other neurons: these rows no longer apply
            self.removed = None


def compact(
    module: Module,
    alive: Tensor | Firing | Mapping[str, Tensor] | Mapping[str, Firing],
    *,
    minimum: int = 1,
    keep_removed: bool = True,
    inplace: bool = False,
) -> tuple[Module, CompactionReport]:
    """Remove the neurons of ``module`` that are not alive; return the result and a report.

    The result is exact where no removed neuron would fire; elsewhere the terms of those neurons are missing. ``alive``
    comes from data and holds for that data alone.

    Args:
        module: a SparseGatedMLP, a SparseMLP, or any model with such layers, whatever ``sparsify_`` makes among them.
            A gate that the model's own code makes raises NotImplementedError.
        alive: for a layer its ``Firing``, or bool [N] that is true for neurons to keep, on any device. For a model a
            mapping from names of layers, as in ``named_modules``, to these, as ``count_firing`` gives it; layers that
            it does not name stay as they are.
        minimum: with ``Firing``, how often a neuron must have fired to be alive.
        keep_removed: keep the removed rows on the CPU, for ``restore``, and in the state dict, which then is as large
            as before. Otherwise they are gone.
        inplace: change the layers of ``module`` itself and return it. Otherwise return a copy and leave ``module`` as
            it is.

    A compacted layer stays what it was except for N: class, ``strategy``, hooks and all else are kept. Its neurons keep
    their order. Their parameters are new, on the same device and with the same ``requires_grad``; gradients,
    ``main_grad`` and the state of an optimizer do not follow, so make the optimizer afterwards. Parameters that other
    modules share are no longer shared.

    N stays a multiple of 8, so up to 7 neurons that are not alive are kept: those that fired most, then the first. The
    gate GEMM's kernel computes tiles of 256 neurons: it gains for each 256 that N falls. Compacting again is possible,
    and ``restore`` then undoes both.

    Each compacted layer gets a child ``compaction`` (see there) with ``kept``, bool [N], and ``neurons``, their
    original indices. To load its state dict into a fresh model, compact that with the masks first:
    ``twell.compact(fresh, {name: state[f"{name}.compaction.kept"]}, inplace=True)``.

    Waits for the device. Raises TypeError for wrong types of layers, evidence or masks, ValueError for masks of the
    wrong length, evidence from no tokens, layers without any neuron alive and names that the module does not have.
    """
    masks, reports = _plan(module, alive, minimum)

    def made(mlp: MLP, name: str) -> tuple[list[Tensor], Compaction]:
        return _left(mlp, masks[name], keep_removed)

    return _resized(module, list(masks), made, inplace), CompactionReport(tuple(reports))


def restore(module: Module, *, inplace: bool = False) -> Module:
    """Undo ``compact``: return ``module``, a compacted layer or a model with some, with all its original neurons.

    Removed neurons come back bitwise, unless the module was cast since; kept neurons stay as they are now, trained or
    not. Parameters of neurons are new, and ``inplace`` is as in ``compact``. Raises ValueError if nothing was compacted
    or the removed rows were dropped.
    """
    compacted = [names[0] for mlp, names in _layers(module).items() if _compaction(mlp) is not None]
    if not compacted:
        raise ValueError(f"restore: module must be or have layers that compact has made, got {_kind(module)}")
    for name in compacted:
        _require_removed(module.get_submodule(name), name)
    return _resized(module, compacted, lambda mlp, _: (_all(mlp), None), inplace)


def _layers(module: nn.Module) -> dict[MLP, list[str]]:
    """The twell layers of a model, each with all its names."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"a torch.nn.Module is expected, got {_kind(module)}")
    layers: dict[MLP, list[str]] = {}
    with unlisted():
        for name, child in module.named_modules(remove_duplicate=False):
            if isinstance(child, (SparseGatedMLP, SparseMLP)):
                layers.setdefault(child, []).append(name)
    return layers


def gate_of(mlp: MLP) -> nn.Linear:
    """The projection before ReLU."""
    return mlp.gate_proj if isinstance(mlp, SparseGatedMLP) else mlp.up_proj


def _compaction(mlp: MLP) -> Compaction | None:
    child = mlp._modules.get("compaction")
    return child if isinstance(child, Compaction) else None


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _plan(module: nn.Module, alive: object, minimum: int) -> tuple[dict[str, Tensor], list[LayerCompaction]]:
    """Check all arguments; return the mask of each layer to compact, by its first name, and the reports."""
    layers = _layers(module)
    if not layers:
        raise TypeError(f"compact: module must be or have SparseGatedMLP or SparseMLP layers, got {_kind(module)}")
    if not isinstance(minimum, int) or minimum < 1:
        raise ValueError(f"compact: minimum must be a positive integer, got {minimum!r}")
    if module in layers and not isinstance(alive, Mapping):
        alive = {"": alive}
    if not isinstance(alive, Mapping):
        raise TypeError(f"compact: alive must map names of layers to Firing or bool tensors, got {_kind(alive)}")
    if unknown := [name for name in alive if not any(name in names for names in layers.values())]:
        known = ", ".join(repr(names[0]) for names in layers.values())
        raise ValueError(f"compact: alive must name layers of the module ({known}), got {unknown[0]!r}")
    masks, reports = {}, []
    for mlp, names in layers.items():
        given = [name for name in names if name in alive]
        if len(given) > 1:
            raise ValueError(f"compact: alive must name a layer once, got {given[0]!r} and {given[1]!r}")
        if given:
            if mlp._given:
                raise NotImplementedError(
                    f"compact: {given[0] or 'module'} must make its gate itself, got one whose gate the model's own "
                    "code makes, of all neurons perhaps"
                )
            masks[names[0]], report = _choose(mlp, given[0], alive[given[0]], minimum)
            reports.append(report)
    return masks, reports


def _choose(mlp: MLP, name: str, evidence: object, minimum: int) -> tuple[Tensor, LayerCompaction]:
    """The neurons to keep, bool [N] on the CPU, and the layer's report."""
    where, n = f"compact: alive of {name or 'module'}", mlp.intermediate
    if isinstance(evidence, Firing):
        if evidence.totals.shape != (n + 1,):
            raise ValueError(f"{where} must have counted its {n} neurons, got {_kind(evidence.counts)}")
        tensor = evidence.totals
    elif isinstance(evidence, Tensor) and evidence.dtype == torch.bool:
        if evidence.shape != (n,):
            raise ValueError(f"{where} must be bool [{n}], got {_kind(evidence)}")
        if minimum != 1:
            raise ValueError(f"{where} is a mask, for which minimum must be 1, got {minimum}")
        tensor = evidence
    else:
        raise TypeError(f"{where} must be bool [{n}] or Firing, got {_kind(evidence)}")
    if tensor.is_meta:
        raise ValueError(f"{where} must have values, got a tensor on meta")

    counts, tokens = tensor.cpu(), None
    words = "as in the mask given"
    if isinstance(evidence, Firing):
        counts, tokens = counts[:-1], int(counts[-1])
        if not tokens:
            raise ValueError(
                f"{where} must come from data, got counts of no tokens: the layer was not called, or only within a "
                "compiled module"
            )
        words = f"alive are those that fired {'once' if minimum == 1 else f'{minimum:,} times'} in {tokens:,} tokens"
    kept = counts >= minimum
    living = int(kept.sum())
    if not living:
        raise ValueError(f"{where} must have a neuron, got none of {n}: the layer adds nothing but its down bias")

    # fill with dead neurons, those that fired most first
    fill = min(-living % _STEP, n - living)
    order = counts.long().masked_fill(kept, -1).sort(descending=True, stable=True).indices
    kept[order[:fill]] = True
    bytes_saved = (n - living - fill) * sum(rows.shape[1] * rows.element_size() for *_, rows in _neurons(mlp, name))
    return kept, LayerCompaction(name, n, living, living + fill, bytes_saved, words, tokens)


def _neurons(mlp: Any, name: str = "") -> list[tuple[nn.Linear, str, Tensor]]:
    """Check and return the parameters with a row for each neuron: the projection, "weight" or "bias", the rows [N, C].

    C of a projection is K, and of a gate and an up projection in one 2 K.
    """
    found = []
    for child in mlp._projections:
        linear, is_down = getattr(mlp, child), child == mlp._projections[-1]
        own = dict(linear.named_parameters())
        where = f"{name}.{child}".strip(".")
        if not isinstance(linear, nn.Linear) or own.keys() - {"bias"} != {"weight"}:
            raise TypeError(
                f"{where} must be an nn.Linear with parameters weight and bias alone, got {_kind(linear)} with "
                f"{sorted(own)}"
            )
        if any(hasattr(parameter, "full_tensor") for parameter in own.values()):
            raise TypeError(
                f"{where} must have plain parameters, got DTensors: compact and restore before the model is sharded"
            )
        for key, parameter in own.items():
            if not is_down:
                rows = parameter.view(-1, mlp.intermediate, *parameter.shape[1:]).transpose(0, 1).flatten(1)
                found.append((linear, key, rows))
            elif key == "weight":
                found.append((linear, key, parameter.t()))
    return found


def _put(mlp: Any, rows: list[Tensor], compaction: Compaction | None) -> None:
    """Give a layer other neurons: ``rows`` are contiguous, in the order and of the widths of ``_neurons``."""
    mlp._laid.put_back()
    # of weights that are one parameter, too
    made: dict[int, nn.Parameter] = {}
    down, n = getattr(mlp, mlp._projections[-1]), len(rows[0])
    for (linear, key, _), new in zip(_neurons(mlp), rows):
        old: Any = linear._parameters[key]
        if linear is down:
            data = new.t() if mlp.down_layout == "rows" else new.t().contiguous()
            linear.in_features = n
        else:
            parts = len(old) // mlp.intermediate
            data = new.view(n, parts, -1).transpose(0, 1).reshape(parts * n, *old.shape[1:])
            linear.out_features = parts * n
        linear._parameters[key] = made.setdefault(id(old), nn.Parameter(data, old.requires_grad))
    mlp.intermediate = n
    mlp._modules.pop("compaction", None)
    if compaction is not None:
        mlp.compaction = compaction.train(mlp.training)


def _left(mlp: MLP, kept: Tensor, keep_removed: bool) -> tuple[list[Tensor], Compaction]:
    """The rows of the neurons that are kept, and the record of a layer of these."""
    before, rows = _compaction(mlp), [rows for *_, rows in _neurons(mlp)]
    left = [t.index_select(0, kept.nonzero().flatten().to(t.device)) for t in rows]
    if before is not None:
        # of the original neurons
        original = before.kept.cpu()
        kept = original.masked_scatter(original, kept)
        keep_removed = keep_removed and before.removed is not None
        rows = _all(mlp) if keep_removed else rows
    gone = (~kept).nonzero().flatten()
    removed = _side_by_side([t.index_select(0, gone.to(t.device)) for t in rows]) if keep_removed else None
    return left, Compaction(kept.to(left[0].device), removed)


def _side_by_side(rows: list[Tensor]) -> Tensor:
    """Rows of several tensors side by side [R, C] on the CPU, in a dtype that holds all values."""
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in rows))
    return torch.cat([t if t.is_meta else t.cpu() for t in (t.to(dtype) for t in rows)], 1)


def _require_removed(mlp: Any, name: str) -> None:
    compaction, rows = mlp.compaction, _neurons(mlp, name)
    what = f"restore: {name or 'module'}"
    if compaction.removed is None:
        raise ValueError(f"{what} must hold the removed rows, got none: it was compacted or loaded without them")
    if compaction.kept.is_meta:
        raise ValueError(f"{what} must know which neurons were kept, got a mask on meta")
    left, n = int(compaction.kept.sum()), compaction.kept.numel()
    expected = [n - left, sum(t.shape[1] for *_, t in rows)]
    if left != mlp.intermediate or list(compaction.removed.shape) != expected:
        raise ValueError(
            f"{what} must have {left} neurons and {expected} of removed ones, as its mask says, "
            f"got {mlp.intermediate} and {list(compaction.removed.shape)}"
        )


def _all(mlp: Any) -> list[Tensor]:
    """The rows of all neurons, those that were removed among them."""
    kept, rows = mlp.compaction.kept, [rows for *_, rows in _neurons(mlp)]
    full = [t.new_empty(kept.numel(), t.shape[1]) for t in rows]
    for whole, t, gone in zip(full, rows, mlp.compaction.removed.split([t.shape[1] for t in rows], 1)):
        mask = kept.to(t.device)
        whole[mask], whole[~mask] = t, gone.to(t)
    return full


def _resized(module: Module, names: list[str], made: Callable[[Any, str], tuple[Any, Any]], inplace: bool) -> Module:
    """Give the layers of these names the rows and the record that ``made(layer, name)`` returns, perhaps in a copy."""
    # these become the parameters of modules that may be trained
    with torch.inference_mode(False), torch.no_grad():
        to = module
        if not inplace:
            own = [
                p
                for name in names
                for linear, key, _ in _neurons(module.get_submodule(name))
                for p in [linear._parameters[key]]
            ]
            # the copy gets others, so that these need no copy, but where other modules have them, too
            uses = collections.Counter(id(p) for m in module.modules() for p in m._parameters.values())
            mine = collections.Counter(map(id, own))
            to = copy.deepcopy(module, {id(p): p for p in own if uses[id(p)] == mine[id(p)]})
        for name in names:
            # one at a time: the memory of the old ones is free for the next
            _put(to.get_submodule(name), *made(module.get_submodule(name), name))
    return to
