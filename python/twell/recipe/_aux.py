"""Figures of each call of a layer, for the loss and the tracker, recorded by hooks that compiled graphs run, too."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twell.base.arguments import require_flag, require_integer
from twell.call.execution import Aux
from twell.nn.compaction import MLP, gate_of
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.nn.record import unwrapped
from twell.runtime import modes

T = TypeVar("T")

# Most unread calls of one layer: beyond that, reading was forgotten.
_MOST_UNREAD = 1024


class Call(NamedTuple):
    """The figures of a call. ``idle``: it had no tokens, or there was none, and the figures are 0."""

    aux: Aux
    idle: bool


class Kept(NamedTuple):
    """The input of a call. ``grad``: whether gradients were recorded."""

    x: Tensor
    grad: bool


class Recorder:
    """The hooks of one layer, and their record of its calls in training mode until it is read.

    calls: the figures with their graphs, for the loss. figures: detached, for the tracker. inputs: of calls in compiled
    graphs, which the tracker counts afterwards; it counts other calls at once, by ``observe``. kept: inputs with
    their graphs, for terms that compute more. called: whether there was a call for the tracker, if only one without
    tokens. skippable: whether a pass may have skipped all layers. Copies are empty and record nothing.
    """

    def __init__(self) -> None:
        self.term = self.tracked = self.observing = self.keeping = self.called = self.skippable = False
        self.observe: Callable[[Tensor], None] | None = None
        self.calls: list[Call] = []
        self.figures: list[Aux] = []
        self.inputs: list[Tensor] = []
        self.kept: list[Kept] = []
        self.handles: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return Recorder().__dict__

    def forget(self) -> None:
        """Leave nothing for the tracker."""
        self.observe = None
        self.inputs.clear()
        self.figures.clear()

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not ((self.observing or self.keeping) and layer.training):
            return
        x = args[0] if args else kwargs.get("x")
        if not isinstance(x, Tensor):
            # the layer itself refuses it
            return
        compiling = modes.compiling()
        if not compiling and modes.in_backward():
            return
        if self.keeping:
            self.kept.append(Kept(_cast(x), torch.is_grad_enabled()))
        if self.observing and compiling:
            self.inputs.append(_cast(x.detach()))
        elif self.observing and self.observe is not None:
            self.observe(x.detach())

    def after(self, layer: Any, args: tuple[Any, ...], output: Any) -> None:
        aux = layer.aux
        if aux is None or not layer.training:
            return
        if not modes.compiling():
            if modes.in_backward():
                layer.aux = None
                return
            if max(len(self.calls), len(self.figures), len(self.kept)) >= _MOST_UNREAD:
                # generating text, for instance, has no loss
                if not torch.is_grad_enabled():
                    return
                raise RuntimeError(
                    f"a layer was called {_MOST_UNREAD} times in training mode without a read of its figures: call "
                    "l1_term after each forward pass (a SparsityTracker: use watch; with inputs: give the "
                    "attention_mask, or use a target of the gate), or record_aux(model, False)"
                )
        idle = (output[0] if isinstance(output, tuple) else output).numel() == 0
        if self.term:
            self.calls.append(Call(aux, idle))
        if self.tracked:
            self.called = True
            if not idle:
                self.figures.append(Aux(aux.l1.detach(), aux.l0))


def _cast(x: Tensor) -> Tensor:
    """x in the dtype in which the layer computes: it is used after autocast has ended."""
    return x.to(modes.product_dtype(x.dtype, x.device.type))


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean over all ranks; ``value`` itself if torch.distributed is not in use."""
    if dist.is_available() and dist.is_initialized():
        value = value.clone()
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


def layers(model: nn.Module) -> dict[str, MLP]:
    """The twell layers of ``model`` by qualified name, without the parts that compiling, DDP and other wrappers add.

    A layer with several names has the first. Raises TypeError if ``model`` is no module, ValueError without a layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    wrappers = nn.parallel.DistributedDataParallel, nn.DataParallel
    within: Any = model.module if isinstance(model, wrappers) else model
    # without a context, so that a graph can be traced
    kinds, modules = (SparseGatedMLP, SparseMLP), within.named_modules()
    found = {unwrapped(name): layer for name, layer in modules if isinstance(layer, kinds)}
    if not found:
        got = f"none in {type(model).__name__}; twell.sparsify_ replaces a model's feed-forward layers with them"
        raise ValueError(f"model must have layers of twell.nn, got {got}")
    return found


def recorder_of(layer: nn.Module) -> Recorder:
    """The recorder of ``layer``, hooked to it; a new one if it has none."""
    recorder = getattr(layer, "_recorder", None)
    if not isinstance(recorder, Recorder) or not recorder.handles:
        recorder = Recorder()
        recorder.handles = [
            layer.register_forward_pre_hook(recorder.before, with_kwargs=True),
            layer.register_forward_hook(recorder.after),
        ]
        setattr(layer, "_recorder", recorder)  # noqa: B010
    return recorder


def release(layer: MLP) -> None:
    """Remove the hooks from ``layer`` once nothing needs them."""
    recorder = getattr(layer, "_recorder", None)
    if recorder is not None and not (recorder.term or recorder.tracked):
        for handle in recorder.handles:
            handle.remove()
        del layer._recorder
        layer.record_aux, layer.aux = False, None


def record_aux(model: nn.Module, enabled: bool = True, *, inputs: bool = False) -> None:
    """Make every twell layer of ``model`` record L1 and L0 of its calls in training mode for ``l1_term``, or stop.

    With ``inputs`` it also keeps the inputs of these calls, for targets of the gate and for masks. Under both tensor
    parallelism and ``torch.compile`` the loss must then have a term that reads them. Register pre-hooks that change a
    layer's input before this call.

    It waits for nothing. Call it before ``torch.compile`` or at least before the first step of a compiled model.
    Recomputation by activation checkpointing is not recorded, except for layers that are compiled one by one inside a
    checkpoint while their term is no part of the loss: call ``clear_aux(model)`` after backward then. Copies of the
    model record nothing before their own ``record_aux``. Raises ValueError if there is no twell layer.
    """
    for layer in layers(model).values():
        if enabled:
            recorder = recorder_of(layer)
            recorder.term = layer.record_aux = True
            recorder.keeping = inputs
        elif (found := getattr(layer, "_recorder", None)) is not None:
            found.term = found.keeping = found.skippable = False
            found.calls.clear()
            found.kept.clear()
            release(layer)


def clear_aux(model: nn.Module, *, skippable: bool = False) -> None:
    """Forget the unread figures of the layers of ``model``.

    With ``skippable`` the pass that follows may skip all of them, as by LayerDrop, and then has terms of 0; otherwise,
    and after the next ``clear_aux``, a term of no call is an error.
    """
    require_flag("skippable", skippable)
    for layer in layers(model).values():
        layer.aux = None
        if (recorder := getattr(layer, "_recorder", None)) is not None:
            recorder.skippable = skippable
            recorder.calls.clear()
            recorder.kept.clear()


def with_tokens(calls: Sequence[T], idle: Sequence[bool]) -> list[T]:
    """The calls that are not ``idle``, or one of them where all are."""
    return [call for call, empty in zip(calls, idle) if not empty] or list(calls[:1])


def mean_over_layers(model: nn.Module, means: list[Tensor]) -> Tensor:
    """The mean of 0-d tensors that may be on several devices, as a term of the loss."""
    device = means[0].device
    term = torch.stack([mean.to(device) for mean in means]).mean()
    if term.requires_grad and not modes.compiling():
        found = list(layers(model).values())
        term.register_hook(lambda _: _forget_recomputed(found))  # type: ignore[no-untyped-call]
    return term


def require_gradients(what: str, layer: MLP) -> None:
    """RuntimeError with what is wrong if a call ran under no_grad in a layer that has something to train."""
    if any(parameter.requires_grad for parameter in (*gate_of(layer).parameters(), *layer.parameters())):
        raise RuntimeError(
            f"{what}, so the term would not train it: the layer ran under no_grad, as in activation checkpointing with "
            "use_reentrant=True. Use use_reentrant=False (in transformers "
            'gradient_checkpointing_kwargs={"use_reentrant": False})'
        )


def _forget_recomputed(found: list[Any]) -> None:
    """At the end of this backward pass, drop the figures that compiled layers in a checkpoint record again."""
    recorders = [recorder_of(layer) for layer in found]
    before = [(record, len(record)) for recorder in recorders for record in (recorder.calls, recorder.kept)]

    def forget() -> None:
        for record, count in before:
            del record[count:]
        for layer in found:
            layer.aux = None

    torch.autograd.Variable._execution_engine.queue_callback(forget)


def l1_warmup(step: int, warmup_steps: int, start: int = 0) -> float:
    """The factor on the coefficient in ``step``: 0 up to ``start``, then linear, 1 from ``start + warmup_steps`` on."""
    for name, value in (("step", step), ("warmup_steps", warmup_steps), ("start", start)):
        require_integer(name, value, 0)
    if step >= start + warmup_steps:
        return 1.0
    return 0.0 if step < start else (step - start) / warmup_steps
