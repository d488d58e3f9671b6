"""Terms of the loss, from the figures that layers have recorded and from inputs that they have kept."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell.base.activation import activation_of
from twell.call import execution, functional
from twell.call.execution import Aux
from twell.nn.compaction import MLP, as_parameters, gate_of, whole
from twell.recipe._aux import Call, layers, mean_over_layers, require_gradients, with_tokens
from twell.runtime import modes


def l1_term(model: nn.Module, *, several: bool = False, attention_mask: Tensor | None = None) -> Tensor:
    """The L1 term of the training loss, a 0-d tensor: the mean over layers of the mean over tokens of ``|h|``.

    h is the hidden state, ``relu(gate) * up`` or ``relu(up)``, and ``|h|`` its sum over neurons: arXiv 2603.23198 adds
    this to the cross-entropy, with coefficient 2e-5. Code with the mean over N neurons has N times that.

    Use it after each forward pass of a model that has been through ``record_aux``. With gradient accumulation each
    micro-batch has its own term, scaled like its cross-entropy; ranks that average gradients average the term. A layer
    that was skipped, as by LayerDrop, or had no tokens, as an expert to which the router sent none, has an L1 of 0, so
    that other layers have the same gradient with and without it.

    Args:
        several: take the mean over all calls with tokens of all layers since the last read, for layers that share
            weights or several forward passes for one loss. Otherwise more than one call is an error.
        attention_mask: of the tokens [...] as the layers get them in x [..., K], or flattened; 0 or False: padding,
            which does not count. It needs ``record_aux(model, inputs=True)`` and runs each layer on other tokens once
            more, forward and backward without the down projection's part of it, outside of compiled graphs; it waits
            for a mask on a GPU. None: all tokens count, padding too.

    Reading clears the record. Raises RuntimeError if no layer recorded anything, if one is in eval mode or recorded
    more than one call, whose record then stays, or if its L1 requires no gradient although its weights do; ValueError
    for a mask of other tokens than a layer's, as where experts get some of them or the model takes padding out itself.
    """
    require_mask(attention_mask)
    calls = read_aux(model, several, "l1_term", attention_mask)
    return mean_over_layers(model, [whole(call.aux.l1) for _, call in calls])


def require_mask(mask: object) -> None:
    """TypeError unless this may be an ``attention_mask``."""
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor [...], 0 where tokens are padding, got {type(mask).__name__}")
    # one that is added to scores is 0 where tokens are none
    if mask is not None and (mask.is_floating_point() or mask.is_complex()):
        raise TypeError(f"attention_mask must be of integers or bools, 0 where tokens are padding, got {mask.dtype}")


def read_aux(model: nn.Module, several: bool, caller: str, mask: Tensor | None = None) -> list[tuple[MLP, Call]]:
    """The unread figures of each layer, as ``l1_term`` uses them; reading clears the record. Errors name ``caller``."""
    found, recorded, recorders = layers(model), {}, []
    for name, layer in found.items():
        recorder = getattr(layer, "_recorder", None)
        if recorder is None or not recorder.term:
            raise RuntimeError(f"{caller}: {name or 'the layer'} records nothing: call record_aux(model) first")
        recorded[name] = with_tokens(recorder.calls, [call.idle for call in recorder.calls])
        recorders.append(recorder)
    for name, calls in recorded.items():
        if len(calls) > 1 and not several:
            hint = "several=True takes the mean over all calls, clear_aux(model) forgets calls without a loss"
            got = f"{name or 'the layer'} was called {len(calls)} times since the last read"
            raise RuntimeError(f"{caller}: {got}; {hint}")
    for layer, recorder in zip(found.values(), recorders):
        recorder.calls.clear()
        layer.aux = None
    idle = [name for name, calls in recorded.items() if not calls]
    evaluated = [name for name in idle if not found[name].training]
    if evaluated:
        who = evaluated[0] or "the layer"
        raise RuntimeError(f"{caller}: {who} recorded nothing: it is in eval mode; call train() on it")
    if len(idle) == len(found) and not any(recorder.skippable for recorder in recorders):
        raise RuntimeError(
            f"{caller}: {idle[0] or 'the layer'} recorded nothing since the last read, which took all, and no other "
            "layer did: the model was not called in training mode, or was compiled before record_aux and skipped its "
            "hooks (torch.compiler.reset() helps); before a pass that may skip all layers call "
            "clear_aux(model, skippable=True)"
        )
    for name, layer in found.items():
        if torch.is_grad_enabled() and not all(call.aux.l1.requires_grad for call in recorded[name]):
            require_gradients(f"{caller}: the L1 of {name or 'the layer'} requires no grad", layer)
    if mask is not None:
        return [(each.layer, Call(figures(each), not len(each.rows))) for each in read_inputs(model, mask)]
    given = [call.aux.l1 for calls in recorded.values() for call in calls]
    like = whole(given[0]).detach() if given else next(iter(found.values())).down_proj.weight.new_zeros(()).float()
    nothing = Call(Aux(*(torch.zeros_like(like, dtype=dtype) for dtype in (like.dtype, torch.float32))), True)
    return [(layer, call) for name, layer in found.items() for call in recorded[name] or [nothing]]


class Input(NamedTuple):
    """An input of a layer as the layer saw it, and the rows [M, K] of it that count."""

    layer: Any
    x: Tensor
    rows: Tensor


def read_inputs(model: nn.Module, mask: Tensor | None = None) -> list[Input]:
    """The inputs that each layer of ``model`` has kept, without tokens where ``mask`` is 0; clears the record.

    A layer that was not called has one without tokens. So all ranks of a mesh gather the same weights.
    """
    read, recorders = list[Input](), dict[str, Any]()
    for name, layer in layers(model).items():
        recorders[name] = recorder = getattr(layer, "_recorder", None)
        if recorder is None or not recorder.keeping:
            raise RuntimeError(f"{name or 'the layer'} keeps no inputs: call record_aux(model, inputs=True) first")
        if layer.accumulate_main_grad:
            expected = "no attention_mask and no target of the gate, which compute more than the layers do"
            raise NotImplementedError(f"accumulate_main_grad: expected {expected}, got one for {name or 'the layer'}")
    if not any(recorder.kept or recorder.skippable for recorder in recorders.values()):
        nothing = "no input since the last read, and no other layer did: the model was not called in training mode"
        raise RuntimeError(f"{next(iter(recorders)) or 'the layer'} kept {nothing}")
    if mask is not None:
        if modes.compiling():
            expected = "a call outside of compiled graphs, whose sizes cannot follow a mask"
            hint = "compile the model, not what reads its term"
            raise NotImplementedError(f"attention_mask: expected {expected}; {hint}")
        places = whole(mask).reshape(-1).nonzero().squeeze(1)
    for name, layer in layers(model).items():
        where, kept = name or "the layer", list(recorders[name].kept)
        recorders[name].kept.clear()
        if torch.is_grad_enabled() and not all(each.grad for each in kept):
            require_gradients(f"{where} kept an input without its gradient", layer)
        found = []
        for x, _ in kept:
            rows = whole(x).reshape(-1, x.shape[-1])
            if mask is not None:
                _require_tokens(mask, where, x.shape[:-1], len(rows))
                places = places.to(rows.device)
                rows = rows.index_select(0, places)
            found.append(Input(layer, x, rows))
        if not found:
            weight = layer.down_proj.weight
            x = torch.zeros(0, layer.hidden, dtype=weight.dtype, device=weight.device)
            found = [Input(layer, x, x)]
        read += with_tokens(found, [not len(each.rows) for each in found])
    return read


def _require_tokens(mask: Tensor, where: str, tokens: torch.Size, count: int) -> None:
    # experts may get all tokens in another order
    flat = len(tokens) == 1 and "experts" not in where.split(".")
    if tokens != mask.shape and not (flat and count == mask.numel()):
        raise ValueError(
            f"attention_mask must be of the tokens of {where}, {list(tokens)}, got {list(mask.shape)}: experts, "
            "sequences without their padding and the two halves of an encoder-decoder have other tokens; leave it out "
            "there, and all tokens count"
        )


def gates(given: Input, most: int) -> Tensor:
    """The gates after ReLU [T, N], in fp32, of up to ``most`` rows of an input."""
    layer, x, rows = given
    if (count := len(rows)) > most:
        # one of each of so many equal parts, the first of the first to the last of the last: in the same place of all
        # parts they would be at the same few positions of every sequence of 2^k tokens
        part = torch.arange(most, device=rows.device)
        rows = rows[part * count // most + part * (count // most) // most]
    if layer._is_plain():
        weight, bias = weights(layer, gate_of(layer), x, rows.dtype)
        gate = F.linear(rows, weight, bias)
    else:
        # an adapter, say
        gate = layer._gate(as_parameters(layer, rows))
    return F.relu(gate).float()


def fires(given: Input, gates: Tensor) -> Tensor:
    """Where gates after ReLU, computed of an input, are above the layer's threshold."""
    level: float | Tensor = activation_of("fatrelu", given.layer.threshold).level(given.rows.dtype)
    return gates.detach() > level


def figures(given: Input) -> Aux:
    """``Aux`` of the rows that count, by another call of the layer on them."""
    layer, x, rows = given
    activation = activation_of(layer.activation, layer.threshold, layer._gated)
    if not layer._is_plain():
        gate, up = layer._pre_activations(as_parameters(layer, rows))
        gate = activation.after(gate)
        return execution.dense_aux(activation.hidden(gate, up), gate, activation)
    names = ("gate_proj", "up_proj") if layer._gated else ("up_proj",)
    operands = [weights(layer, getattr(layer, name), x, rows.dtype) for name in names]
    options = {**activation.options(), "strategy": layer._site() or layer.strategy, "compression": layer.compression}
    options |= {"return_aux": True}
    # y is not used, so that any weight of this shape will do for the down projection
    down = operands[0][0].detach().t()
    if not layer._gated:
        ((up, b_up),) = operands
        return functional.sparse_ffn(rows, up, down, b_up=b_up, **options)[1]  # type: ignore[no-any-return]
    (gate, b_gate), (up, b_up) = operands
    return functional.sparse_gated_ffn(rows, gate, up, down, b_gate=b_gate, b_up=b_up, **options)[1]  # type: ignore[no-any-return]


def weights(layer: Any, projection: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The whole weight and bias of a projection, in the dtype of its input."""
    weight = _gathered(projection.weight, x)
    if weight.shape != (layer.intermediate, layer.hidden):
        expected, got = [layer.intermediate, layer.hidden], list(weight.shape)
        why = "has flat parts outside of forward, unless its sharding strategy is SHARD_GRAD_OP or NO_SHARD"
        hint = f"FSDP1 {why}; fully_shard (FSDP2) needs nothing"
        raise ValueError(f"the gate's weight must be {expected}, got {got}: {hint}")
    bias = None if projection.bias is None else _gathered(projection.bias, x).to(dtype)
    return weight.to(dtype), bias


def _gathered(t: Tensor, x: Tensor) -> Tensor:
    """The whole of a parameter after forward, when FSDP2 has divided it again; ``x`` is as the layer saw it.

    Ranks of a tensor-parallel mesh, which x names, have the same tokens and compute the same gradient. Others have
    tokens of their own, and the gradient is the mean of theirs, as by FSDP2's default.
    """
    if not hasattr(t, "full_tensor"):
        return t
    # a torch without distributed support has no such tensors
    from torch.distributed.tensor import DTensor, Partial, Replicate

    assert isinstance(t, DTensor)
    names = t.device_mesh.mesh_dim_names or (None,) * t.device_mesh.ndim
    same: tuple[Any, ...] = ()
    if isinstance(x, DTensor):
        same = names if x.device_mesh == t.device_mesh else x.device_mesh.mesh_dim_names or ()
    return t.full_tensor(grad_placements=[Replicate() if name in same else Partial("avg") for name in names])
