"""The feed-forward layers of a model in memory, and the tokens that they are called with."""

import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twell.base.activation import RELU, Activation, activation_of
from twell.integrations import sparsify
from twell.nn import compaction
from twell.nn.converted import made_by
from twell.nn.float8 import Float8MLP
from twell.nn.layers import SparseGatedMLP
from twell.ops.float8 import product, quantize_tokens
from twell.runtime.log import warn_once


@dataclass(frozen=True, eq=False)
class Watched:
    """A module that is called with x as first argument. number: its index in the model's stack."""

    name: str
    number: int
    module: nn.Module


@dataclass(frozen=True, eq=False)
class WatchedLayer(Watched):
    """A feed-forward layer that fires where its gates are above the threshold of its activation.

    gates: makes them, [M, N], of tokens x [M, K] and, with ``after``, of what the module returned for these. linear:
    the projection that does, if that is a weight and a bias and no more. float8: whether the layer computes in e4m3.
    """

    k: int
    n: int
    gated: bool
    gates: Callable[[Tensor, Tensor], Tensor]
    activation: Activation = RELU
    linear: nn.Linear | None = None
    after: bool = False
    float8: bool = False


@dataclass(frozen=True, eq=False)
class WatchedExperts(Watched):
    """A layer of stacked experts. weights: [E, N, K], of the projections that the activation follows."""

    weights: Tensor
    gated: bool
    activation: Activation


def found(model: nn.Module, names: sparsify.Names | None = None) -> tuple[list[WatchedLayer], list[WatchedExperts]]:
    """The layers and the stacked experts of ``model`` that twell computes or would, in its order.

    Those are the layers of twell and, if there are none or ``names`` are given, what ``sparsify_(model, names=names)``
    would replace. Layers of another activation are left out. A number is from the name ("layers.3.mlp" is 3), or counts
    from 0 if names do not distinguish layers. Raises as ``sparsify_`` if there are no layers and no experts.
    """
    routed = _stacked(model)
    made = sparsify.layers(model) | sparsify.layers(model, Float8MLP)
    if names is not None or not made:
        try:
            planned = sparsify.plan(model, None, None, "dense", names, [each.module for each in routed], some=True)
        except (TypeError, ValueError) as error:
            raise type(error)(re.sub(r"\bsparsify_", "analyze", str(error))) from error
        made |= {candidate.layer: candidate for candidate in planned.candidates}
    layers = [
        _candidate(each, number) if isinstance(each, sparsify.Candidate) else _layer(name, number, each)
        for (name, each), number in zip(made.items(), numbers(made))
    ]
    return layers, routed


def numbers(names: Iterable[str]) -> list[int]:
    """The numbers of layers with these names."""
    numbers = [next((int(part) for part in name.split(".") if part.isdecimal()), -1) for name in names]
    return list(range(len(numbers))) if len(set(numbers)) < len(numbers) or -1 in numbers else numbers


def _layer(name: str, number: int, module: Any) -> WatchedLayer:
    """A layer of twell."""
    float8 = isinstance(module, Float8MLP)
    gated = module._gated if float8 else isinstance(module, SparseGatedMLP)

    def gates(x: Tensor, _: Tensor) -> Tensor:
        if float8:
            first = getattr(module, module._names[0])
            return product(quantize_tokens(x, module.input_scale), first.record(), first.bias, torch.float32).bfloat16()
        made: Tensor = module._gate(x)
        return made

    linear = None if float8 or module._given else _plain(compaction.gate_of(module))
    form = activation_of(module.activation, module.threshold, gated)
    sizes = module.hidden, module.intermediate
    return WatchedLayer(name, number, module, *sizes, gated, gates, form, linear, float8=float8)


def _candidate(candidate: sparsify.Candidate, number: int) -> WatchedLayer:
    """A module that is no layer of twell; its own gate projection is watched, or its second layer."""
    module, form = candidate.module, candidate.form
    gated, k, n = candidate.shape
    first = module.get_submodule(form.children[0])

    def gates(_: Tensor, y: Tensor) -> Tensor:
        if form.fused:
            y = y.chunk(2, -1)[form.fused == "up first"]
        made: Tensor = made_by(module, candidate.steps, y) if candidate.steps else y
        return made

    linear = None if form.fused or candidate.steps else _plain(first)
    float8 = bool(candidate.stored) and not candidate.dequantised
    return WatchedLayer(candidate.layer, number, first, k, n, gated, gates, candidate.activation, linear, True, float8)


def _plain(projection: Any) -> nn.Linear | None:
    """A projection whose weight has 16 bits or more."""
    return projection if isinstance(projection, nn.Linear) and projection.weight.dtype.itemsize > 1 else None


def _stacked(model: nn.Module) -> list[WatchedExperts]:
    """The stacked experts of ``model`` that twell computes, numbered by themselves."""
    if "transformers" not in sys.modules:
        return []
    # it loads much of transformers
    stacked = importlib.import_module("twell.integrations.experts")
    modules, watched = dict(stacked.found(model)), []
    for (name, module), number in zip(modules.items(), numbers(modules)):
        w_gate, w_up = stacked.projections(module)
        weights = (w_up if w_gate is None else w_gate).detach()
        watched.append(WatchedExperts(name, number, module, weights, module.has_gate, stacked.activation(module)))
    return watched


def patterns(activation: Activation, gates: Callable[[slice], Tensor], tokens: int, n: int) -> Iterator[Tensor]:
    """The neurons that so many tokens fire, bool [rows, N] of some at a time; NaN fires. ``gates`` makes the gates."""
    step = max(1, compaction.CHUNK_GATES // n)
    for start in range(0, tokens, step):
        made = gates(slice(start, start + step))
        yield ~(made <= activation.level(made.dtype))


@torch.no_grad()
def observe(
    model: nn.Module,
    watched: Sequence[Watched],
    batches: Iterable[Any],
    on_call: Callable[..., object],
    run: Callable[..., object] | None = None,
) -> None:
    """Call ``model``, or ``run``, on each batch, and ``on_call(i, x, y, *others)`` for ``watched[i]`` each time.

    A batch is what the model is called with: a tensor, a tuple of arguments or a dict of named ones. x [tokens, K] and
    what the module returned, y, or x again before a call, have no tokens of padding, by the batch's ``attention_mask``
    or, in a decoder, ``decoder_attention_mask``. Other tensors with which a module is called, such as the routes of
    experts, follow. The model is in evaluation mode meanwhile. Raises ValueError if x is not finite, or if it has other
    tokens than the batch's, as in an expert that is a module.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    paired = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    bound: dict[str, Any] = {}

    def present_in(at: Watched, x: Tensor) -> Tensor:
        """Which tokens are no padding, bool [tokens]."""
        decoder = paired and "decoder" in at.name.split(".")
        mask, count = bound.get(f"{'decoder_' * decoder}attention_mask"), math.prod(x.shape[:-1])
        tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        ids = next((t for t in tensors if t.dim() == 2 and not t.is_floating_point()), None)
        sequences = x.shape[0] if x.dim() > 2 else 1
        if x.dim() < 3 and ids is not None and not paired:
            if ids.numel() != count:
                raise ValueError(f"{at.name}: expected the batch's {ids.numel()} tokens, got {count}")
            sequences = ids.shape[0]
        shape = [sequences, count // sequences]
        if isinstance(mask, Tensor) and mask.dim() == 2:
            if list(mask.shape) == shape:
                return mask.bool().to(x.device).flatten()
            if not bool(mask.all()):
                got = f"{shape} tokens for a mask of {list(mask.shape)}"
                raise ValueError(f"{at.name}: expected the tokens of the batch's mask, sequences first, got {got}")
        return torch.ones(count, dtype=torch.bool, device=x.device)

    def hook(i: int) -> Callable[..., None]:
        def called(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], y: Any = None) -> None:
            x, *others = [t for t in (*given, *named.values()) if isinstance(t, Tensor)]
            if x.is_nested:
                raise ValueError(
                    f"{watched[i].name}: expected a plain tensor, got a nested one; enable_nested_tensor=False"
                )
            if not x.numel():
                return
            present = present_in(watched[i], x)
            tensors = [t.reshape(-1, t.shape[-1]) for t in (x, x if y is None else y, *others)]
            if not bool(present.all()):
                tensors = [t[present] for t in tensors]
            if not bool(tensors[0].isfinite().all()):
                raise ValueError(f"{watched[i].name}: its input is not finite in {x.dtype}; another dtype may help")
            on_call(i, *tensors)

        return called

    modes = {module: module.training for module in model.modules()}
    handles = []
    for i, each in enumerate(watched):
        after = isinstance(each, WatchedLayer) and each.after
        register = each.module.register_forward_hook if after else each.module.register_forward_pre_hook
        handles.append(register(hook(i), with_kwargs=True))
    try:
        model.eval()
        for batch in batches:
            args, kwargs = _arguments(batch, device)
            bound = _named(model, args, kwargs)
            (run or model)(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        # what other code does where a mode changes, it does again
        model.train(modes[model])
        for module, mode in modes.items():
            module.training = mode


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names that ``forward`` gives them, of a compiled model that of the model."""
    try:
        signature = inspect.signature(getattr(model, "_orig_mod", model).forward)
        if len(args) > 1 and any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values()):
            warn_once("analyze: forward takes *args, so a mask of padding counts only where a batch is a dict")
        return dict(signature.bind_partial(*args, **kwargs).arguments) | kwargs
    except (TypeError, ValueError):
        # the call itself says what is wrong
        return kwargs


def _arguments(batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(batch, Tensor):
        return (moved(batch),), {}
    if isinstance(batch, Mapping):
        return (), {name: moved(value) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(map(moved, batch)), {}
    raise TypeError(f"analyze: a batch must be a tensor, a tuple or a dict, got {type(batch).__name__}")
