"""The autograd functions: a sparse layer, the activation of a dense one, and weights whose gradient goes to a main."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from twell import ops
from twell._activation import RELU, Activation
from twell._runtime import nvtx
from twell.ops import hybrid
from twell.ops.hybrid_backward import on_cuda as backward_on_cuda
from twell.ops.hybrid_forward import on_cuda as forward_on_cuda
from twell.ops.library import has_tangent, is_direct
from twell.ops.operands import Gradients, Mains, Needs, Operands, is_in_memory
from twell.ops.reglu import derivatives, pays


def ffn(
    name: str,
    operands: Operands,
    mains: Mains,
    compression: int,
    held: int,
    activation: Activation,
    direct: bool,
    totals: bool,
    screen: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return y [M, K], the sum of |h| (0-d), the number of non-zeros (0-d, int64) and the hybrid format's ``sizes``.

    The first two are differentiable. Without ``totals`` all but y may be None. ``direct``: whether the code of the
    operators may be called without the dispatcher. Backward adds the gradient of a weight to its main, if it has one,
    instead of returning it. With ``screen`` an int8 product says which gates are computed.
    Errors speak of ``name``.
    """
    if not torch.compiler.is_compiling() and any(main is not None for main in mains):
        for weight, main in mains._asdict().items():
            if main is not None:
                # of a view, because the engine does not always know whether the node of a leaf will run
                view = getattr(operands, weight).view_as(main)
                operands = operands._replace(**{weight: view})
    call = (name, compression, held, activation, direct, totals, screen)
    outputs: Any = _FFN.apply(*call, *mains, *operands)  # type: ignore[no-untyped-call]
    if direct and not totals:
        return outputs, None, None, None
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], outputs)


class _FFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        compression: int,
        held: int,
        activation: Activation,
        direct: bool,
        totals: bool,
        screen: bool,
        main_gate: Tensor | None,
        main_up: Tensor | None,
        main_down: Tensor | None,
        x: Tensor,
        w_gate: Tensor,
        w_up: Tensor | None,
        w_down: Tensor,
        b_gate: Tensor | None,
        b_up: Tensor | None,
        b_down: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = Operands(x, w_gate, w_up, w_down.t(), b_gate, b_up, b_down)
        l1: Tensor | None
        nonzeros: Tensor | None
        if direct:
            y, l1, nonzeros, kept = forward_on_cuda(layer, compression, held, activation, totals, screen)
        else:
            y, l1, nonzeros, *tensors = ops.hybrid_forward(*layer, compression, held, *activation, screen)
            kept = hybrid.Kept(*tensors)
        ctx.save_for_backward(x, w_gate, w_up, w_down, *map(_saveable, (b_gate, b_up)), *kept)
        # not as saved tensors: a hook that moves those would make backward add to a copy
        ctx.mains = mains = Mains(main_gate, main_up, main_down)
        ctx.name, ctx.direct, ctx.activation = name, direct, activation
        if not torch.compiler.is_compiling():
            weights = zip(Mains._fields, (w_gate, w_up, w_down), mains)
            ctx.nodes = {w: weight.grad_fn for w, weight, main in weights if weight is not None and main is not None}
        ctx.set_materialize_grads(False)
        if l1 is None or nonzeros is None:
            return y
        ctx.mark_non_differentiable(nonzeros, kept.sizes)
        return y, l1, nonzeros, kept.sizes

    @staticmethod
    @nvtx.marked(lambda ctx, dy, *_: _backward_range(ctx.name, dy))
    def backward(ctx: Any, dy: Tensor | None, dl1: Tensor | None = None, *_: None) -> tuple[Tensor | None, ...]:
        needs = Needs(*ctx.needs_input_grad[-len(Operands._fields) :])
        compiling = torch.compiler.is_compiling()
        if not compiling and ctx.nodes:
            _require_addable(dy, dl1)
            # this backward pass may want less than forward announced: torch.autograd.grad may ask for x alone
            runs = torch._C._will_engine_execute_node
            needs = needs._replace(**{weight: False for weight, node in ctx.nodes.items() if not runs(node)})
        db_down = None
        if needs.b_down and dy is not None:
            db_down = dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(dy.dtype)
        gradients = Gradients(b_down=db_down)
        saved: tuple[Any, ...] = ()
        if any(tuple(needs)[:-1]) and not (dy is None and dl1 is None):
            saved = ctx.saved_tensors if compiling else _saved(ctx)
            x = saved[0]
            # saved tensors may have passed hooks, and the gradient may be anything
            present = [t for t in (dy, dl1, *saved) if t is not None]
            direct = ctx.direct and is_direct(x) and eager(present) and not any(map(_is_batched, present[:2]))
            with torch.no_grad():
                gradients = _gradients(dy, dl1, saved, needs, ctx.mains, ctx.activation, direct)._replace(
                    b_down=db_down
                )
        if not compiling and torch.is_grad_enabled():
            gradients = _first_order(ctx.name, gradients, (dy, dl1, *saved))
        return (*[None] * (len(ctx.needs_input_grad) - len(gradients)), *gradients)


def _saved(ctx: Any) -> Any:
    """The saved tensors; NotImplementedError if one was changed in place meanwhile.

    Dense PyTorch does not read x with frozen weights. The kernels do, for a batch that overflows the hybrid format.
    """
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise NotImplementedError(
            f"{ctx.name}: the sparse path reads x and the weights in backward, frozen or not, got one that was changed "
            'in place after the call: write h = h + layer(h) for h += layer(h), or use strategy="dense" '
            f"({error})"
        ) from error


def _saveable(bias: Tensor | None) -> Tensor | None:
    """A bias for backward, a copy of one made in inference mode: dense PyTorch saves none and takes it."""
    return bias.clone() if bias is not None and not torch.compiler.is_compiling() and bias.is_inference() else bias


# is_grads_batched=True makes batched tensors without a transform of torch.func
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def _require_addable(*upstream: Tensor | None) -> None:
    """Raise NotImplementedError unless gradients made from ``upstream`` can be added to mains."""
    present = [g for g in upstream if g is not None]
    if torch._C._are_functorch_transforms_active() or any(map(_is_batched, present)):
        got = "a batch of them or those of a transform of torch.func"
    elif any(map(has_tangent, present)):
        got = "some with forward-mode tangents"
    else:
        return
    raise NotImplementedError(f"main_grads take the gradients of a plain backward pass, got {got}")


def _backward_range(name: str, dy: Tensor | None) -> nvtx.Context:
    """Return the profiler's range of the backward pass of ``name``. The operator's own range holds the other sizes."""
    return nvtx.range(f"{name}.backward", category=nvtx.BACKWARD, m=None if dy is None else dy.shape[0])


def _gradients(
    dy: Tensor | None,
    dl1: Tensor | None,
    saved: tuple[Any, ...],
    needs: Needs,
    mains: Mains,
    activation: Activation,
    direct: bool,
) -> Gradients:
    """Add the gradients of weights that have a main to it, and return the others that are needed."""
    x, w_gate, w_up, w_down, b_gate, b_up, *kept = saved
    # the gradient of l1 alone leaves the down projection out
    down_needed = needs.w_down and dy is not None
    if dy is None:
        dy = torch.zeros_like(x)
    if dl1 is None and direct and x.shape[0]:
        # without a kernel that clears memory
        dl1 = hybrid.zero(hybrid.Kept(*kept))
    elif dl1 is None:
        dl1 = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
    arguments = (dy, dl1, x, w_gate, w_up, w_down.t(), b_gate, b_up, *kept)
    weights_needed = (needs.w_gate, needs.w_up, down_needed)

    if any(needed and main is not None for needed, main in zip(weights_needed, mains)):
        targets: list[Any] = []
        for weight, needed, main in zip((w_gate, w_up, w_down), weights_needed, mains):
            if weight is None or (needed and main is not None):
                targets.append(main)
            else:
                targets.append(torch.zeros_like(weight, dtype=torch.float32))
        main_gate, main_up, main_down = targets
        dx, db_gate, db_up = ops.hybrid_backward_accumulate(
            *arguments, main_gate, main_up, main_down, needs.x, *activation, True
        )
        dw_gate, dw_up, dw_down = (
            target.to(x.dtype) if needed and main is None else None
            for target, needed, main in zip(targets, weights_needed, mains)
        )
    else:
        weight_grad = any(weights_needed) or needs.b_gate or needs.b_up
        if direct:
            layer = Operands(*arguments[2:8])
            given = hybrid.Backward(dy, dl1, layer, hybrid.Kept(*kept), activation)
            found: Any = backward_on_cuda(given, needs.x, weight_grad)[:-1]
        else:
            found = ops.hybrid_backward(*arguments, needs.x, weight_grad, *activation)
        dx, dw_gate, dw_up, dw_down, db_gate, db_up = found
        # stored as the weight is, for optimizers that flatten gradients
        dw_down = (ops.matrix_transpose(dw_down) if w_down.is_contiguous() else dw_down.t()) if down_needed else None

    every = Gradients(dx, dw_gate, dw_up, dw_down, db_gate, db_up)
    return Gradients(*(gradient if needed else None for gradient, needed in zip(every, needs)))


def _first_order(name: str, gradients: Gradients, sources: tuple[Tensor | None, ...]) -> Gradients:
    """Return ``gradients``, and make their derivative with respect to ``sources`` an error instead of silently none."""
    present = [g for g in gradients if g is not None]
    outputs = iter(_FirstOrder.apply(name, len(present), *present, *sources))  # type: ignore[no-untyped-call]
    return Gradients(*(None if g is None else next(outputs) for g in gradients))


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(gradient.view_as(gradient) for gradient in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.name}: the sparse path has no second derivative, got a backward pass through its gradients; "
            'use strategy="dense"'
        )


def into_main(weight: Tensor, main: Tensor | None) -> Tensor:
    """Return ``weight``. If there is a ``main``, backward adds the gradient to it and passes none on."""
    return weight if main is None else cast(Tensor, _IntoMain.apply(weight, main))  # type: ignore[no-untyped-call]


class _IntoMain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, main: Tensor) -> Tensor:
        ctx.main = main
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        if not torch.compiler.is_compiling():
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
    compiling = torch.compiler.is_compiling()
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


def _transforming() -> bool:
    """Whether a transform of torch.func or a level of forward-mode AD is open."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# the mark of torch.compiler.assume_constant_result: tracing opens the transforms that it traces, and calls this
_transforming._dynamo_marked_constant = True  # type: ignore[attr-defined]


def transformed(operands: Mapping[str, Tensor], needing: bool) -> str:
    """Name what asks for a transform of torch.func or forward-mode AD, which only PyTorch's operators have; else "".

    ``needing`` is whether autograd will want gradients.
    """
    if not _transforming():
        return ""
    if torch.compiler.is_compiling():
        # tracing does not tell which tensors the transform wraps
        return "a call inside a transform"
    if torch._C._are_functorch_transforms_active():
        for argument, value in operands.items():
            if torch._C._functorch.is_functorch_wrapped_tensor(value):
                return f"{argument} of a transform of torch.func"
        if needing:
            return "gradients that pass a transform of torch.func"
    return next((f"{argument} with a forward-mode tangent" for argument, t in operands.items() if has_tangent(t)), "")


def eager(operands: Iterable[Tensor]) -> bool:
    """Whether these are plain tensors that hold values, and nothing traces or transforms the call."""
    return (
        not torch.compiler.is_compiling()
        and all((type(t) is Tensor or type(t) is torch.nn.Parameter) and is_in_memory(t) for t in operands)
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad._current_level < 0
    )


def fuses(gate: Tensor, operands: Iterable[Tensor]) -> bool:
    """Whether ``gated_relu`` can take this gate, the result of eager operations on ``operands``; loads its kernels.

    Other gates take torch's operators: no kernel knows the tensors, or a compiler fuses the operators itself.
    """
    # in this order: what ``pays`` asks cannot be traced
    return eager(operands) and pays(gate)


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
        torchs_own = torch.is_grad_enabled() or has_tangent(dh) or not (gate_needed and up_needed)
        if not (torchs_own or torch._C._are_functorch_transforms_active()):
            return *ops.reglu_backward(dh, gate, up, *ctx.activation), None
        d_gate, d_up = derivatives(dh, gate, up, ctx.activation)
        return d_gate if gate_needed else None, d_up if up_needed else None, None
