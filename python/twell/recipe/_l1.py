"""The L1 term of the loss, from what the layers have recorded."""

import torch
from torch import Tensor, nn

from twell.call.execution import Aux
from twell.nn.compaction import MLP, whole
from twell.recipe._aux import Call, layers, mean_over_layers, require_gradients, with_tokens
from twell.recipe._inputs import figures, read_inputs


def l1_term(model: nn.Module, *, several: bool = False, attention_mask: Tensor | None = None) -> Tensor:
    """The L1 term of the training loss, a 0-d tensor: the mean over layers of the mean over tokens of ``|h|``.

    h is the hidden state, ``relu(gate) * up`` or ``relu(up)``, and ``|h|`` its sum over neurons: arXiv 2603.23198 adds
    this to the cross-entropy, with coefficient 2e-5. Code that takes the mean over N neurons has N times the
    coefficient.

    Use it after each forward pass of a model that has been through ``record_aux``::

        loss = cross_entropy + coefficient * recipe.l1_term(model)

    With gradient accumulation each micro-batch has its own term, scaled like its cross-entropy; ranks that average
    gradients average the term. A layer that was skipped, as by LayerDrop, or had no tokens, as an expert to which the
    router sent none, has an L1 of 0, so that other layers have the same gradient with and without it.

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
