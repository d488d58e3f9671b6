"""The L1 term of the loss, from what the layers have recorded."""

import torch
from torch import Tensor, nn

from twell.call.execution import Aux
from twell.nn.compaction import MLP
from twell.recipe._aux import Call, layers, mean_over_layers, require_gradients, whole, with_tokens


def l1_term(model: nn.Module) -> Tensor:
    """The L1 term of the training loss, a 0-d tensor: the mean over layers of the mean over tokens of ``|h|``.

    h is the hidden state, ``relu(gate) * up`` or ``relu(up)``, and ``|h|`` its sum over neurons: arXiv 2603.23198 adds
    this to the cross-entropy, with coefficient 2e-5. Code that takes the mean over N neurons has N times the
    coefficient.

    Use it after each forward pass of a model that has been through ``record_aux``::

        loss = cross_entropy + coefficient * recipe.l1_term(model)

    With gradient accumulation each micro-batch has its own term, scaled like its cross-entropy; ranks that average
    gradients average the term. Of several calls since the last read, as of layers that share weights or passes for one
    loss, it is the mean. A layer that was skipped, as by LayerDrop, or had no tokens, as an expert to which the router
    sent none, has an L1 of 0, so that other layers have the same gradient with and without it. Padding counts as
    tokens.

    Reading clears the record. Raises RuntimeError if no layer recorded anything, if one is in eval mode, or if its L1
    requires no gradient although its weights do.
    """
    return mean_over_layers(model, [whole(call.aux.l1) for _, call in read_aux(model, "l1_term")])


def read_aux(model: nn.Module, caller: str) -> list[tuple[MLP, Call]]:
    """The unread figures of each layer, as ``l1_term`` uses them; reading clears the record. Errors name ``caller``."""
    found, recorded, recorders = layers(model), {}, []
    for name, layer in found.items():
        recorder = getattr(layer, "_recorder", None)
        if recorder is None or not recorder.term:
            raise RuntimeError(f"{caller}: {name or 'the layer'} records nothing: call record_aux(model) first")
        recorded[name] = with_tokens(recorder.calls, [call.idle for call in recorder.calls])
        recorders.append(recorder)
    for layer, recorder in zip(found.values(), recorders):
        recorder.calls.clear()
        layer.aux = None
    idle = [name for name, calls in recorded.items() if not calls]
    evaluated = [name for name in idle if not found[name].training]
    if evaluated or (len(idle) == len(found) and not any(recorder.skippable for recorder in recorders)):
        raise RuntimeError(_nothing(caller, evaluated[:1] or idle[:1], bool(evaluated)))
    for name, layer in found.items():
        if torch.is_grad_enabled() and not all(call.aux.l1.requires_grad for call in recorded[name]):
            require_gradients(f"{caller}: the L1 of {name or 'the layer'} requires no grad", layer)
    given = [call.aux.l1 for calls in recorded.values() for call in calls]
    like = whole(given[0]).detach() if given else next(iter(found.values())).down_proj.weight.new_zeros(()).float()
    nothing = Call(Aux(*(torch.zeros_like(like, dtype=dtype) for dtype in (like.dtype, torch.float32))), True)
    return [(layer, call) for name, layer in found.items() for call in recorded[name] or [nothing]]


def _nothing(caller: str, names: list[str], evaluated: bool) -> str:
    if evaluated:
        return f"{caller}: {names[0] or 'the layer'} recorded nothing: it is in eval mode; call train() on it"
    return (
        f"{caller}: {names[0] or 'the layer'} recorded nothing since the last read, which took all, and no other layer "
        "did: the model was not called in training mode, or was compiled before record_aux and skipped its hooks "
        "(torch.compiler.reset() helps); before a pass that may skip all layers call clear_aux(model, skippable=True)"
    )
