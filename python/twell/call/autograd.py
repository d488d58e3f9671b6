"""The autograd functions: a sparse layer, the activation of a dense one, and weights whose gradient goes to a main."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from twell import ops
from twell.base.activation import RELU, Activation
from twell.ops.hybrid_backward import build, transpose
from twell.ops.hybrid_forward import Forward, forward_of
from twell.ops.library import is_direct, rows, unviewed
from twell.ops.operands import Form, Layer, Mains, Place, made
from twell.ops.reglu import derivatives, pays
from twell.runtime import modes
from twell.runtime.program import Executable, allocate, kept

# what a call that measures or counts does with the number of non-zeros (0-d; None without totals) and the format
Note = Callable[[Any, Tensor], None]


class Call(NamedTuple):
    """How a layer runs in training.

    totals: whether the sum of |h| and the number of non-zeros are wanted, too. passes: what runs it without the
    dispatcher. first: the column of the weights' gradients, and row of w_down's, from which on they are wanted.
    """

    name: str
    compression: int
    held: int
    activation: Activation
    screen: bool = False
    totals: bool = False
    note: Note | None = None
    passes: Passes | None = None
    first: int = 0


def ffn(
    call: Call, operands: Layer, mains: Mains, direct: bool = False, apply: Callable[..., Any] | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y [..., K], the sum of |h| (0-d) and the number of non-zeros (0-d, int64); Nones unless ``call.totals``.

    The first two are differentiable. Backward adds gradients of weights to their mains instead of returning them.
    ``direct``: as ``is_direct``; then kernels run without the dispatcher where they can read all operands in place.
    ``apply``: what applies another autograd function than ``_FFN`` in its place.
    """
    x: Any = operands.x
    passes, how = None, call
    if direct and x.numel():
        how_many = call.compression, call.held, call.activation, call.screen, call.totals, call.first
        passes = passes_of(Form.of(operands.unscaled), *how_many)
    if passes is not None:
        how = passes.call if call.note is None else call._replace(passes=passes)
    elif operands.gate is None and x.dim() != 2 and modes.compiling():
        operands = operands._replace(x=x.reshape(-1, x.shape[-1]))
    given = operands
    if not modes.compiling():
        for weight, main in mains._asdict().items():
            if main is not None:
                # of a view, because the engine does not always know whether the node of a leaf will run
                given = given._replace(**{weight: getattr(operands, weight).view_as(main)})
    found: Any = (apply or _FFN.apply)(how, *mains, *given.unscaled)
    if found is None:
        return ffn(call, operands, mains, apply=apply)
    y, l1, nonzeros = found if isinstance(found, tuple) else (found, None, None)
    return (y if y.dim() == operands.tokens.dim() else unviewed(y, x.shape)), l1, nonzeros


class Passes:
    """A layer's passes in eager training for plain tensors of one form; called with others, it returns None."""

    __slots__ = ("call", "down", "form", "forward", "places")

    def __init__(self, form: Form, forward: Forward, call: Call) -> None:
        self.form, self.forward, self.call = form, forward, call._replace(passes=self)
        _, ((n, k), _, dtype), w_up, (_, strides, _), b_gate, b_up, *_ = form.places  # type: ignore[misc]
        weight, bias = ((n, k), (k, 1), dtype), ((n,), (1,), dtype)
        # thresholds lie behind the biases of the gate, or do not
        of_gate = b_gate and (b_gate[0], (1,), dtype)
        # of the gradients, that of w_down [N, K]
        self.places: list[Place | None] = [forward.y, weight, w_up and weight, weight, of_gate, b_up and bias]
        # a gradient is stored as the weight is, for optimizers that flatten gradients
        self.down: Any = ((k, n), (n, 1), dtype) if strides == (n, 1) else None

    def __call__(self, *operands: Tensor | None) -> Tensor | None:
        return _apply(self.call, None, None, None, *operands, None)  # type: ignore[no-any-return]

    def backward(
        self, dy: Tensor, dl1: Tensor | None, saved: Sequence[Any], needs: Sequence[bool]
    ) -> list[Tensor | None] | None:
        """The gradients that are needed of ``gradients_of``; None, with nothing launched, where it cannot be."""
        x = saved[0]
        of_x, of_gate, of_up, of_down, of_b_gate, of_b_up, *_ = needs
        weights = of_gate or of_up or of_down or of_b_gate or of_b_up
        if not dy.is_contiguous():
            # expanded or transposed, as sums and products leave it
            dy = rows(dy.reshape(-1, dy.shape[-1]))
        run, places, transposed = _backward_of(self, dy.shape, dy.stride(), dl1 is not None, of_x, weights)
        found: list[Any] = [None if place is None else allocate(x, *place) for place in places]
        if found[4] is not None and len(found[4]) != len(saved[1]):
            # thresholds have no gradient
            found[4].zero_()
        if self.call.first and torch.is_anomaly_enabled():
            # it looks for NaN in all columns
            for gradient in found[1:4]:
                if gradient is not None:
                    gradient.zero_()
        if not run.ran(*[t for t in (dy, dl1, *saved, *found) if t is not None]):
            return None
        if of_down:
            # laid out as the weight is
            if transposed is None:
                found[3] = found[3].t()
            else:
                dw_down, found[3] = found[3], allocate(x, *self.down)
                transposed(dw_down, found[3])
        return [*(gradient if needed else None for gradient, needed in zip(found, needs)), None]


@kept
def passes_of(
    form: Form, compression: int, held: int, activation: Activation, screen: bool, totals: bool = False, first: int = 0
) -> Passes | None:
    """The passes of layers of this form, w_down [K, N]; None if kernels read only copies, or a layer runs as slices."""
    forward = forward_of(form, compression, held, activation, screen, totals)
    name = "sparse_ffn" if form.places[2] is None else "sparse_gated_ffn"
    call = Call(name, compression, held, activation, screen, totals, first=first)
    return None if forward is None else Passes(form, forward, call)


@kept
def _backward_of(
    passes: Passes, shape: Any, strides: Any, with_dl1: bool, input_grad: bool, weight_grad: bool
) -> tuple[Executable, list[Place | None], Executable | None]:
    """What runs backward for a dy that lies so, the gradients that it fills, and what transposes that of w_down."""
    dx, *others = passes.places
    places = [dx if input_grad else None, *(others if weight_grad else [None] * len(others))]
    dl1: Place | None = ((), (), torch.float32) if with_dl1 else None
    device, down = passes.form.device, passes.down
    dy = shape, strides, passes.forward.y[2]
    form = Form(device, (dy, dl1, *passes.form.places[:6], None, None, passes.forward.kept, *places, None, None))
    transposed = None if down is None or places[3] is None else made(transpose, Form(device, (places[3], down)))
    return made(build, form, passes.call.activation, False, passes.call.first), places, transposed


def forward_pass(call: Call, *layer: Any) -> Any:
    """y, l1, the number of non-zeros and kept, for ``_FFN``; None, with nothing launched, if its passes cannot."""
    if call.passes is not None:
        found: Any = call.passes.forward(*layer)
        if found is None:
            return None
    else:
        x, w_gate, w_up, w_down, *biases, gate = layer
        # x is saved as it is, whichever way: a recomputation may take the other one
        x = x if x is None or x.dim() == 2 else x.reshape(-1, x.shape[-1])
        operands = x, w_gate, w_up, w_down.t(), *biases
        found = ops.hybrid_forward(*operands, call.compression, call.held, *call.activation, call.screen, gate)
    if call.note is not None:
        call.note(found[2], found[3])
    return found


def backward_pass(
    call: Call, dy: Tensor | None, dl1: Tensor | None, saved: Any, needs: Sequence[bool], mains: Mains | None = None
) -> Sequence[Tensor | None]:
    """``gradients_of`` a layer, by the passes if they can."""
    if dy is not None and not (call.passes is None or mains or modes.compiling()) and _is_undisturbed(dy, dl1, saved):
        found = call.passes.backward(dy, dl1, saved, needs)
        if found is not None:
            return found
    with torch.no_grad():
        return gradients_of(dy, dl1, saved, needs, mains or Mains(), call.activation, call.first)


def of_bias(dy: Tensor) -> Tensor:
    """The gradient of b_down."""
    return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32).to(dy.dtype)


class _FFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> Tensor | tuple[Tensor, Tensor, Tensor] | None:
        main_gate, main_up, main_down, x, w_gate, w_up, w_down, b_gate, b_up, _, gate = tensors
        found = forward_pass(call, *tensors[3:])
        if found is None:
            return None
        y, l1, nonzeros, kept = found
        if gate is None and y.dim() != x.dim():
            y = unviewed(y, x.shape)
        if b_gate is not None or b_up is not None:
            b_gate, b_up = saveable(b_gate), saveable(b_up)
        ctx.save_for_backward(x, w_gate, w_up, w_down, b_gate, b_up, kept, gate)
        # a note may hold the operands
        ctx.call = call if call.note is None else call._replace(note=None)
        ctx.mains, ctx.nodes = None, None
        if main_gate is not None or main_up is not None or main_down is not None:
            # not as saved tensors: a hook that moves those would make backward add to a copy
            ctx.mains = mains = Mains(main_gate, main_up, main_down)
            if not modes.compiling():
                weights = zip((w_gate, w_up, w_down), mains)
                of_weights = [None if main is None else weight.grad_fn for weight, main in weights]
                ctx.nodes = [None, *of_weights, None, None, None, None]
        ctx.set_materialize_grads(False)
        if not call.totals:
            return y  # type: ignore[no-any-return]
        ctx.mark_non_differentiable(nonzeros)
        return y, l1, nonzeros

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dl1: Tensor | None = None, _: None = None) -> tuple[Tensor | None, ...]:
        call, mains, needs = ctx.call, ctx.mains, ctx.needs_input_grad[4:]
        compiling = modes.compiling()
        if ctx.nodes and not compiling:
            _require_addable(dy, dl1)
            # this backward pass may want less than forward announced: torch.autograd.grad may ask for x alone
            runs = torch._C._will_engine_execute_node
            needs = [needed and (node is None or runs(node)) for needed, node in zip(needs, ctx.nodes)]
        *of_passes, of_b_down, of_given = needs
        gradients: Sequence[Tensor | None] = (None,) * 7
        saved: tuple[Any, ...] = ()
        if (of_given or any(of_passes)) and not (dy is None and dl1 is None):
            saved = ctx.saved_tensors if compiling else saved_of(ctx)
            gradients = backward_pass(call, dy, dl1, saved, needs, mains)
        *found, of_gate = gradients
        gradients = *found, of_bias(dy) if of_b_down and dy is not None else None, of_gate
        if not compiling and torch.is_grad_enabled():
            gradients = tuple(first_order(call.name, gradients, (dy, dl1, *saved)))
        return None, None, None, None, *gradients


# without the part of torch.autograd.Function for transforms of torch.func
_apply: Any = super(torch.autograd.Function, _FFN).apply


def _is_undisturbed(dy: Tensor, dl1: Tensor | None, saved: Sequence[Any]) -> bool:
    """Whether a backward pass is of plain tensors of the current device, which nothing records or differentiates."""
    if torch.is_grad_enabled() or modes.transformed() or is_batched(dy) or (dl1 is not None and is_batched(dl1)):
        return False
    # saved tensors may have passed hooks
    for t in (dy, dl1, *saved):
        if t is not None and (type(t) not in modes.PLAIN_TENSORS or not modes.is_in_memory(t)):
            return False
    return is_direct(dy)


def saved_of(ctx: Any) -> Any:
    """The saved tensors; NotImplementedError if one was changed in place meanwhile.

    Dense PyTorch does not read x with frozen weights. The kernels do, for a batch that overflows the hybrid format.
    """
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        what = "the sparse path reads x and the weights in backward, frozen or not"
        instead = 'write h = h + layer(h) for h += layer(h), or use strategy="dense"'
        got = f"one that was changed in place after the call: {instead} ({error})"
        raise NotImplementedError(f"{ctx.call.name}: {what}, got {got}") from error


def saveable(bias: Tensor | None) -> Tensor | None:
    """A bias for backward, a copy of one made in inference mode: dense PyTorch saves none and takes it."""
    return bias.clone() if bias is not None and not modes.compiling() and bias.is_inference() else bias


# is_grads_batched=True makes batched tensors without a transform of torch.func
is_batched = torch._C._functorch.is_legacy_batchedtensor


def _require_addable(*upstream: Tensor | None) -> None:
    """Raise NotImplementedError unless gradients made from ``upstream`` can be added to mains."""
    present = [g for g in upstream if g is not None]
    if modes.functorch() or any(map(is_batched, present)):
        got = "a batch of them or those of a transform of torch.func"
    elif any(map(modes.has_tangent, present)):
        got = "some with forward-mode tangents"
    else:
        return
    raise NotImplementedError(f"main_grads take the gradients of a plain backward pass, got {got}")


def gradients_of(
    dy: Tensor | None,
    dl1: Tensor | None,
    saved: tuple[Any, ...],
    needs: Sequence[bool],
    mains: Mains,
    activation: Activation,
    first: int = 0,
) -> tuple[Tensor | None, ...]:
    """Add gradients of weights to their mains; return the others needed: of x, weights, b_gate, b_up and given gate."""
    x, w_gate, w_up, w_down, b_gate, b_up, kept, gate = saved
    of_x, of_gate, of_up, of_down, of_b_gate, of_b_up, _, of_given = needs
    tokens = x if gate is None else gate
    shape = tokens.shape
    if len(shape) != 2:
        x, dy = (None if t is None else t.reshape(-1, shape[-1]) for t in (x, dy))
    # the gradient of l1 alone leaves the down projection out
    of_down = of_down and dy is not None
    if dy is None:
        dy = tokens.new_zeros((math.prod(shape[:-1]), len(w_down)))
    arguments = (dy, dl1, x, w_gate, w_up, w_down.t(), b_gate, b_up, kept)
    weights_needed, d_given = (of_gate, of_up, of_down), None

    if any(needed and main is not None for needed, main in zip(weights_needed, mains)):
        targets: list[Any] = []
        adds = modes.GRAPHS_ADD_TO_VIEWS or not modes.compiling()
        for weight, needed, main in zip((w_gate, w_up, w_down), weights_needed, mains):
            if weight is None or (needed and main is not None and adds):
                targets.append(main)
            else:
                targets.append(torch.zeros_like(weight, dtype=torch.float32))
        dx, db_gate, db_up = ops.hybrid_backward_accumulate(*arguments, *targets, of_x, *activation, True)
        of_weights: list[Any] = []
        for target, needed, main in zip(targets, weights_needed, mains):
            if needed and main is not None and target is not main:
                main.add_(target)
            of_weights.append(target.to(x.dtype) if needed and main is None else None)
        dw_gate, dw_up, dw_down = of_weights
    else:
        weight_grad = any(weights_needed) or of_b_gate or of_b_up
        found: Any = ops.hybrid_backward(*arguments, of_x, weight_grad, *activation, first, gate, of_given)
        dx, dw_gate, dw_up, dw_down, db_gate, db_up = found
        d_given = None if gate is None else dw_gate
        # stored as the weight is, for optimizers that flatten gradients
        dw_down = (ops.matrix_transpose(dw_down) if w_down.is_contiguous() else dw_down.t()) if of_down else None

    if of_x and len(shape) != 2:
        dx = dx.view(shape)
    every = dx, dw_gate, dw_up, dw_down, db_gate, db_up, d_given
    return tuple(gradient if needed else None for gradient, needed in zip(every, (*needs[:6], of_given)))


def first_order(
    name: str, gradients: Sequence[Tensor | None], sources: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Return ``gradients``, and make their derivative with respect to ``sources`` an error instead of silently none."""
    present = [g for g in gradients if g is not None]
    outputs = iter(_FirstOrder.apply(name, len(present), *present, *sources))  # type: ignore[no-untyped-call]
    return [None if g is None else next(outputs) for g in gradients]


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(gradient.view_as(gradient) for gradient in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        got = 'a backward pass through its gradients; use strategy="dense"'
        raise NotImplementedError(f"{ctx.name}: the sparse path has no second derivative, got {got}")


class IntoMain(torch.autograd.Function):
    """A weight whose gradient backward adds to its main, and passes on to nothing."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main: Tensor) -> Tensor:
        ctx.main = main
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        if not modes.compiling():
            _require_addable(gradient)
        with torch.no_grad():
            ctx.main.add_(gradient)
        return None, None


# Megatron's name: a weight with this attribute wants to hear that its gradient went to its main
_ADDED = "grad_added_to_main_grad"


def announced(weight: Tensor, owner: Tensor) -> Tensor:
    """Return ``weight``, the parameter ``owner`` or a view of it, whose gradient goes to a main.

    If the owner has the attribute ``grad_added_to_main_grad``, backward sets it and leaves a gradient of zeros, so that
    hooks of the parameter run; a graph sets it in the forward pass, since backward runs no Python.
    """
    if not hasattr(owner, _ADDED) or not weight.requires_grad or not torch.is_grad_enabled():
        return weight
    compiling = modes.compiling()
    if compiling:
        setattr(owner, _ADDED, True)
    return cast(Tensor, _Announced.apply(weight, None if compiling else owner))  # type: ignore[no-untyped-call]


class _Announced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, owner: Tensor | None) -> Tensor:
        ctx.owner = owner
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, zeros: Tensor) -> tuple[Tensor, None]:
        # that the layer passes none on makes zeros of it
        if ctx.owner is not None:
            setattr(ctx.owner, _ADDED, True)
        return zeros, None


def fuses(gate: Tensor, activation: Activation, operands: Iterable[Tensor]) -> bool:
    """Whether ``gated_relu`` can take this gate, the result of eager operations on ``operands``; loads its kernels."""
    # no kernel knows thresholds that are tensors; and what ``pays`` asks, the last, cannot be traced
    return not isinstance(activation.threshold, Tensor) and modes.eager(operands) and pays(gate, gate.numel())


def gated_relu(gate: Tensor, up: Tensor, activation: Activation = RELU) -> Tensor:
    """``relu(gate) * up``, or another activation, in one pass, and its gradients in another: ``ops.reglu``."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return cast(Tensor, _GatedReLU.apply(gate, up, activation))  # type: ignore[no-untyped-call]
    return ops.reglu(gate, up, *activation)  # type: ignore[no-any-return]


class _GatedReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ops.reglu(gate, up, *activation)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        gate_needed, up_needed, _ = ctx.needs_input_grad
        # double backward, forward-mode AD, only one gradient wanted, or a batch of them
        torchs_own = torch.is_grad_enabled() or modes.has_tangent(dh) or not (gate_needed and up_needed)
        if not (torchs_own or modes.functorch()):
            return *ops.reglu_backward(dh, gate, up, *ctx.activation), None
        d_gate, d_up = derivatives(dh, gate, up, ctx.activation)
        return d_gate if gate_needed else None, d_up if up_needed else None, None
