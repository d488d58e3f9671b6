"""The functions that users call. They check operands once and choose how a call runs; everything below trusts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from twell.base.activation import TOP_K, Activation, ActivationName, activation_of
from twell.call import execution, quantised
from twell.call.admission import admit, admit_given, admit_mains, admitted, needing_grad, require_of_neurons, sharded
from twell.call.choice import choice_of
from twell.call.execution import NOTHING, Aux, Call, Extra, copies_down
from twell.call.plain import overridden
from twell.call.quantised import is_quantised, records
from twell.choose.cards import imposed_on_call
from twell.choose.plan import Facts, Route, route_of, routed
from twell.choose.site import AutoStrategy, enroll, found, tokens_of, without_site
from twell.ops import hybrid
from twell.ops.calls import How, known
from twell.ops.e4m3 import layer_of
from twell.ops.float8 import Float8
from twell.ops.library import is_direct
from twell.ops.operands import Layer, Mains
from twell.ops.slices import is_sliced
from twell.runtime import geometry, modes
from twell.runtime.log import info_once, warn_once
from twell.runtime.modes import PLAIN_TENSORS

Strategy = Literal["auto", "dense", "row", "union"]
PlainActivation = Literal[ActivationName, "topk", "batchtopk"]


def sparse_gated_ffn(
    x: Tensor | Float8,
    w_gate: Tensor | Float8,
    w_up: Tensor | Float8,
    w_down: Tensor | Float8,
    *,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: ActivationName = "relu",
    threshold: float | Tensor = 0,
    strategy: Strategy | AutoStrategy = "auto",
    invariant: bool = False,
    compression: int = 8,
    main_grads: Sequence[Tensor | None] | None = None,
    return_aux: bool = False,
    fast_accum: bool = True,
) -> Any:
    """``(relu(x @ w_gate^T + b_gate) * (x @ w_up^T + b_up)) @ w_down^T + b_down``, on the non-zeros of the gate.

    ReLU, or another ``activation`` of its family.

    Args:
        x: tokens [..., K]. Read in place if its rows are 16-byte aligned and of unit stride, else copied.
        w_gate, w_up: [N, K]. The intermediate size N is a multiple of 8 up to 1,048,576, the hidden size K one up to
            16,384. More than 65,536 neurons run as slices: outputs of these are rounded, added in fp32 and rounded.
        w_down: [K, N], as in nn.Linear. Sparse strategies read it in place if it is the transposed view of a contiguous
            [N, K] tensor. Else they copy it in each forward and each backward pass, which is logged once.
        b_gate, b_up: [N]. b_down: [K]. Optional.
        activation: "relu"; "relu2", the square of the gate's ReLU; "drelu", ReLU of the gate and of the up projection;
            "fatrelu", the gate where it is above ``threshold``, else 0.
        threshold: of "fatrelu", a finite number of at least 0; rounded to the dtype of x first. 0, the default, makes
            that "relu"; other activations must have 0. A tensor [N] has one for each neuron: JumpReLU, as sparse
            autoencoders call it. It takes no gradient. On a GPU, where a look would be a wait, a negative one is 0, by
            one that is NaN every gate passes, and by an infinite one none. A 0-d tensor on the device of x is a
            threshold that changes during training: no call waits for it, no graph is for one value, and the call runs
            dense, whatever the strategy.
        strategy: how the call runs. "row" reads the weight rows of each token's non-zeros. "union" works on tiles of
            128 tokens and the neurons that any token of a tile fires. Both are the same where a gradient will be
            needed, and for few tokens in one pass; every named strategy runs float32 and float64 dense, which is logged
            once at INFO. "dense" is plain PyTorch, for any size and any dtype of F.linear.
            "auto" takes the cheapest strategy for a sparse layer of this size: mostly "union", "row" for few tokens. It
            keeps nothing between calls and so measures nothing. An ``AutoStrategy`` that you keep, as the modules do,
            chooses by measured sparsity. It alone may screen: compute a gate only where a product in int8 and a bound
            of its error say that it may be a non-zero, which misses one with a probability of at most 2^-80
            (docs/notes/screen.md). Graphs without gradients choose when they run.
            Both are dense on a CPU and, after a warning, on a GPU that was not measured. Strategies may differ in the
            last bits of a result. Where many tokens fire many neurons "row" takes many times as long as dense: 16.8 ms
            to 1.6 for 16,384 tokens with 911 non-zeros each (H100, K = 2,048, N = 5,632).
        invariant: with "row", "auto" or an ``AutoStrategy``, inference runs "row", on a GPU with the same bits for a
            token whatever other tokens the call has, and however many. Calls that need gradients, a threshold that is
            a 0-d tensor, and a class or mode that overrides PyTorch's operators raise NotImplementedError.
        compression: 2, 4 or 8. A tile of 256 neurons takes 256 / compression words. It holds one non-zero fewer than
            that and spills beyond. The speed depends on it, the result does not.
        main_grads: float32 tensors (main_gate, main_up, main_down) of the weights' shapes. Backward adds the weights'
            gradients to them in fp32 and leaves the weights' ``.grad`` as it is. Views of one buffer must not overlap.
            With None for a weight, its gradient goes to ``.grad``. A backward pass that wants no gradient of a weight,
            such as ``torch.autograd.grad(y, x)``, adds none; one that torch.compile traced adds all. main_down is added
            to in place if it is the transposed view of [N, K] rows, else through a copy.
        return_aux: also return ``Aux(l1, l0)``.
        fast_accum: with e4m3 weights, whether tensor cores hold whole sums, of which they keep about 14 bits, as
            ``use_fast_accum`` of ``torch._scaled_mm``; else they hold sums of 128 products.

    Weights may be e4m3, all of them, as ``twell.Float8`` records: then x is bfloat16, or a record, y is bfloat16, and
    calls are inference (docs/float8.md). What follows is of 16-bit weights.

    All tensors are bfloat16 or float16 and on one device: a GPU of compute capability 8.0 or higher, or the CPU. The
    CPU takes float32 and float64 too, for tests. Under autocast every call first casts floating tensors, except for
    float64, to autocast's dtype.

    Returns y [..., K] of the dtype of x (under autocast: of autocast). The gate is rounded to that dtype, as in dense
    PyTorch. Everything after it is fp32 until y, but "union", few tokens in one pass and training round the hidden
    state. NaN and infinite gates propagate. Neurons whose gate is zero add nothing, except that a non-finite weight row
    may make NaN of 0 * inf in tokens that do not fire it, as in dense PyTorch.

    y and ``aux.l1`` are differentiable once, with respect to x, weights and biases. Gradients are as close to the true
    ones as dense PyTorch's at any sparsity, and the same bits in every run. For backward a call keeps its operands and
    the gate in the hybrid format of ``cute_kernels/geometry.py``, at most 1.0 KB per token at N = 5632.

    All operands may be DTensors of a mesh of one dimension that divides the neurons: w_gate and w_up sharded on
    dimension 0 and w_down on dimension 1. Then y and ``aux`` are DTensors, Partial as sums over ranks;
    ``twell.call.sharding`` has the rules.

    "auto" is "dense", with PyTorch's derivatives, under transforms of torch.func (grad, jvp, vmap and those made of
    them), for operands with a forward-mode tangent, and under torch.export where a gradient is needed. Named sparse
    strategies raise NotImplementedError there; export them under ``torch.no_grad()``. An operand of a class, or a
    TorchFunctionMode, that overrides PyTorch's operators makes a call dense, after a warning.

    Raises TypeError, ValueError or NotImplementedError naming what was got and expected; a second derivative raises
    NotImplementedError unless ``strategy`` is "dense".
    """
    kind = activation_of(activation, threshold, by_neuron=True)
    how = How(kind, strategy, invariant, compression, fast_accum)
    if not (modes.compiling() or return_aux or main_grads is not None):
        y = known((x, w_gate, w_up, w_down, b_gate, b_up, b_down), how)
        if y is not None:
            return y
    weights, biases = (w_gate, w_up, w_down), (b_gate, b_up, b_down)
    if is_quantised(x, weights):
        _require_inference(main_grads, return_aux, kind)
        return run_scaled(sparse_gated_ffn, x, records("sparse_gated_ffn", weights), biases, how)
    return run(sparse_gated_ffn, Layer(x, *weights, *biases), how, main_grads, return_aux)


def sparse_ffn(
    x: Tensor | Float8,
    w_up: Tensor | Float8,
    w_down: Tensor | Float8,
    *,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: PlainActivation = "relu",
    threshold: float | Tensor = 0,
    strategy: Strategy | AutoStrategy = "auto",
    invariant: bool = False,
    compression: int = 8,
    main_grads: Sequence[Tensor | None] | None = None,
    return_aux: bool = False,
    fast_accum: bool = True,
    k: float | None = None,
    bandwidth: float | None = None,
    counts: Tensor | None = None,
) -> Any:
    """``relu(x @ w_up^T + b_up) @ w_down^T + b_down``, on the non-zeros of the hidden state.

    w_up is [N, K], w_down [K, N], b_up [N], b_down [K], main_grads (main_up, main_down). The activation "drelu" needs a
    gate. Everything that is not said here is as in ``sparse_gated_ffn``, errors and the dtypes that run dense included.

    Args:
        activation: also "topk", ReLU of the ``k`` largest pre-activations of each token, of equal ones those of the
            first neurons; and "batchtopk", ReLU of the ``int(k * tokens)`` largest of the whole call, of equal ones
            those of the first tokens. The others have no gradient. N is at most 65,536 there, and in training k at most
            N / 36, or 64 if that is more; for more, named sparse strategies raise NotImplementedError and "auto" is
            dense.
        k: of these two; a whole number for "topk".
        bandwidth: of "fatrelu" with a threshold [N] that requires grad: the width of the straight-through estimator of
            its gradient, of JumpReLU and of its L0 (arXiv 2407.14435): with g the pre-activation of a neuron and dh the
            gradient of its hidden state, the sum over tokens with ``abs(g - threshold) < bandwidth / 2`` of
            ``-threshold / bandwidth * dh``. ``aux.l0`` has a gradient, too: of each non-zero ``-1 / bandwidth`` there.
            A threshold below 0 is 0, and keeps its gradient. PyTorch makes the pre-activations of such a call, and
            the gradient costs a dense product and a byte of memory for each of them. Not with ``main_grads``.
        counts: int64 [N], to which the number of tokens that fire each neuron is added.
    """
    choice = choice_of(x, activation, threshold, k, bandwidth)
    if bandwidth is not None:
        # one that is trained may step below 0
        threshold = threshold.detach().clamp(min=0)  # type: ignore[union-attr]
    if choice is not None:
        if main_grads is not None or invariant:
            what = '"batchtopk"' if choice.threshold is None else "a bandwidth"
            got = "main_grads" if main_grads is not None else "invariant=True"
            raise NotImplementedError(f"sparse_ffn: {what} takes no main_grads and no invariant=True, got {got}")
        activation, threshold = ("relu", 0) if choice.threshold is None else (activation, threshold)
    elif activation == TOP_K:
        threshold = k  # type: ignore[assignment]
    kind = activation_of(activation, threshold, gated=False, by_neuron=True, top_k=True)
    how = How(kind, strategy, invariant, compression, fast_accum)
    extra = NOTHING if choice is None and counts is None else Extra(None, choice, counts)
    if not (modes.compiling() or return_aux or main_grads is not None) and extra is NOTHING:
        y = known((x, w_up, None, w_down, b_up, None, b_down), how)
        if y is not None:
            return y
    weights, biases = (w_up, None, w_down), (b_up, None, b_down)
    if is_quantised(x, weights):
        if choice is not None or counts is not None:
            raise NotImplementedError("e4m3 weights take no batchtopk, bandwidth or counts, got one of them")
        _require_inference(main_grads, return_aux, kind)
        return run_scaled(sparse_ffn, x, records("sparse_ffn", weights), biases, how)
    return run(sparse_ffn, Layer(x, *weights, *biases), how, main_grads, return_aux, extra)


def sparse_up_down(
    x: Tensor | None,
    gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    *,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: ActivationName = "relu",
    threshold: float | Tensor = 0,
    strategy: Strategy | AutoStrategy = "auto",
    compression: int = 8,
    return_aux: bool = False,
) -> Any:
    """``(relu(gate) * (x @ w_up^T + b_up)) @ w_down^T + b_down``, on the non-zeros of a gate that is given.

    It is ``twell.sparse_gated_ffn`` behind the gate projection, for gates that come from elsewhere: a projection with
    an adapter or with quantised weights, a product in fp8, or another layer.

    Args:
        x: tokens [..., K]; None without ``w_up``.
        gate: [..., N], before the activation, which the function applies. Without ``w_up`` what the activation makes of
            it is the hidden state: ``relu(gate) @ w_down^T + b_down``.
        w_up: [N, K], or None. w_down: [K, N], as in nn.Linear; sizes and layouts are those of
            ``twell.sparse_gated_ffn``.
        b_up: [N], with ``w_up`` alone. b_down: [K]. Optional.
        activation, threshold, compression: as in ``twell.sparse_gated_ffn``.
        strategy: "auto", "row", "union", "dense", or an ``AutoStrategy`` that is kept, as there. "auto" compares the
            whole layer's costs, in which the gate is about the same for all. The int8 screen has no part in it.
        return_aux: also return ``Aux(l1, l0)``.

    Returns y [..., K] of the dtype of gate (under autocast: of autocast). y and ``aux.l1`` are differentiable once,
    with respect to x, gate, weights and biases. The gradient of the gate [..., N] is zero wherever the activation of
    the gate is. For backward a call keeps its operands and the gate in the hybrid format.

    All operands are of one dtype and on one device, as in ``twell.sparse_gated_ffn``. Tensors that override PyTorch's
    operators, DTensors, transforms of torch.func and exports with gradients run dense by "auto"; a named strategy
    raises NotImplementedError in the latter two. Raises TypeError, ValueError or NotImplementedError naming what was
    got and expected.
    """
    how = How(activation_of(activation, threshold, gated=w_up is not None), strategy, False, compression)
    return run(sparse_up_down, Layer(x, None, w_up, w_down, None, b_up, b_down, gate), how, None, return_aux)


def _require_inference(main_grads: Any, return_aux: bool, activation: Activation) -> None:
    """Raise for what calls on e4m3 weights do not have."""
    if activation.by_neuron or activation.k:
        got = "one for each neuron" if activation.by_neuron else f"the {activation.k} largest gates"
        raise NotImplementedError(f"threshold must be a number with e4m3 weights, got {got}")
    if main_grads is not None or return_aux:
        asked = "main_grads" if main_grads is not None else "return_aux"
        raise NotImplementedError(f"{asked}: e4m3 weights are for inference alone; train, and measure, the 16-bit ones")


def run_scaled(
    function: Callable[..., Any],
    x: Tensor | Float8,
    weights: Sequence[Any],
    biases: Sequence[Tensor | None],
    how: How,
    input_scale: Tensor | None = None,
) -> Tensor:
    """Run ``sparse_gated_ffn`` or ``sparse_ffn`` on e4m3 weights: gate, or up, then up or None, and down [K, N].

    ``input_scale``: fp32 [1], by which all of a bfloat16 x is divided; else each token has its own.
    """
    needed = weights if function is sparse_gated_ffn else weights[::2]
    if not modes.compiling() and all(type(weight) is Float8 for weight in needed):
        y = known(layer_of(x, weights, biases, input_scale), how)
        if y is not None:
            return y
    return run(function, quantised.admitted(function.__name__, x, weights, biases, how, input_scale), how)  # type: ignore[return-value]


def run(
    function: Callable[..., Any],
    given: Layer,
    how: How,
    main_grads: Sequence[Tensor | None] | None = None,
    return_aux: bool = False,
    extra: Extra = NOTHING,
) -> Tensor | tuple[Tensor, Aux]:
    """Run ``function``, one of the three of layers, on the operands ``given``, w_down [K, N].

    A layer with scales was admitted. It admits the others, asks ``plan`` and then the site for the route, and computes.
    """
    name, gives = function.__name__, function is sparse_up_down
    asked = _asked(how, not (gives or given.scaled))
    if how.activation.moves:
        # no kernel reads a threshold that may change
        routed(Facts(name, asked.strategy, how.invariant, moving=True))
        how, asked = how._replace(strategy="dense", invariant=False), _Asked("dense")
    layer, operands, mains, training, direct = _admitted(function, given, main_grads)
    if layer is None:
        return _on_shards(function, operands, main_grads, return_aux, how, extra)  # type: ignore[no-any-return]
    extra = _fitting(name, layer, how, asked, extra)
    made, choice, _ = extra
    training = training or (choice is not None and choice.threshold is not None)
    training = training or (made is not None and made.apply is not None)
    asked = _of_the_largest(name, layer, how, asked, extra, training)
    on = layer.tokens.device
    imposed = imposed_on_call(on.type, on.index) if asked.strategy == "auto" else ""
    options = {"imposed": imposed, "training": training, "compression": how.compression}
    facts = Facts(name, asked.strategy, asked.invariant, asked.site is not None, asked.screen, **options)
    if operands is not None and asked.strategy != "dense":
        facts = _gathered(facts, operands, layer)
    route = routed(facts)
    if operands is not None:
        _say(facts, route)
    call = Call(name, how, extra, return_aux, training, operands is None, direct)
    site = asked.site if route.strategy == "auto" else None
    if route.strategy == "auto":
        route = _chosen(call, layer, site, route)
    if how.activation.k:
        # room for the k of every token, and a gate that is computed whole
        route = route._replace(held=0, screen=False)
    first = None
    if site is not None:
        # the operators find the site by a weight that the caller holds
        first = given.w_gate if not gives else given.w_down if given.w_up is None else given.w_up
        if made is not None and made.held is not None:
            first = made.held
        if not modes.tracing(0) and type(first) in PLAIN_TENSORS and found(first) is not site:
            enroll(first, site)
    how.activation.level(torch.bfloat16 if layer.scaled else layer.tokens.dtype)
    if direct and not return_aux and main_grads is None and extra is NOTHING:
        y = execution.settled(call, layer, route, site is not None)
        if y is not None:
            return y
    return execution.run(call, layer, route, mains, first)


class _Asked(NamedTuple):
    """What a call asks for: a strategy by name, the site behind "auto", whether it may screen, and the same bits."""

    strategy: Any
    site: AutoStrategy | None = None
    screen: bool = False
    invariant: Any = False


def _asked(how: How, screens: bool) -> _Asked:
    """``screens``: whether the layer may be screened."""
    strategy, invariant = how.strategy, how.invariant
    if isinstance(strategy, AutoStrategy):
        return _Asked("auto", strategy, strategy.screens and screens and not (invariant or how.activation.k), invariant)
    if isinstance(strategy, Route) and invariant is False:
        # benchmarks and tests hand in routes that have no name
        return _Asked(strategy.strategy, None, strategy.screen, strategy.invariant)
    return _Asked(strategy, invariant=invariant)


class _Admitted(NamedTuple):
    """Operands that were checked. layer: None of DTensors. training, direct: see ``Call``.

    operands: by name, as autocast casts them; None of plain tensors in eager mode.
    """

    layer: Layer | None
    operands: Any = None
    mains: Mains = Mains()
    training: bool = False
    direct: bool = False


def _admitted(function: Callable[..., Any], given: Layer, main_grads: Sequence[Tensor | None] | None) -> _Admitted:
    name, gated = function.__name__, function is not sparse_ffn
    if given.scaled:
        # the dispatcher makes others real, or records them
        return _Admitted(given, direct=modes.eager([t for t in given if t is not None]) and is_direct(given.x))
    if function is sparse_up_down:
        t = admit_given(name, given)
        return _Admitted(Layer(*map(t.get, Layer._fields)), t, training=bool(needing_grad(t)))
    named, mains = given.named(gated), Mains()
    if admitted(given, gated):
        # the answers to all questions that ``admit`` asks
        if main_grads is not None:
            mains = admit_mains(name, {a: t for a, t in named.items() if t is not None}, named, main_grads)
        return _Admitted(given, None, mains, torch.is_grad_enabled() and given.requires_grad(), is_direct(given.x))
    t = admit(name, **named)
    if sharded(t):
        return _Admitted(None, t)
    return _Admitted(Layer.of(t), t, admit_mains(name, t, named, main_grads), bool(needing_grad(t)))


def _fitting(name: str, layer: Layer, how: How, asked: _Asked, extra: Extra) -> Extra:
    """``extra`` as it is for this layer and pass; raises unless it, and thresholds of neurons, fit the layer."""
    _, choice, counts = extra
    if how.activation.by_neuron:
        require_of_neurons(name, "threshold", how.activation.threshold, layer, "a number or")
    if counts is not None and not modes.compiling() and modes.in_backward():
        # a recomputation counts no token again
        extra = extra._replace(counts=None)
    elif counts is not None:
        require_of_neurons(name, "counts", counts, layer, "int64", torch.int64)
        if asked.invariant:
            raise NotImplementedError(f"{name}: counts are of calls without invariant=True, got it")
    if choice is not None and choice.most:
        most = min(choice.most, tokens_of(layer.tokens) * len(layer.w_gate))
        extra = extra._replace(choice=choice._replace(most=most))
    return extra


def _of_the_largest(name: str, layer: Layer, how: How, asked: _Asked, extra: Extra, training: bool) -> _Asked:
    """What is asked of a call that chooses the largest gates, of which kernels take one slice."""
    most = 0 if extra.choice is None else extra.choice.most
    if not (how.activation.k or most) or asked.strategy == "dense":
        return asked
    n, k = len(layer.w_gate), how.activation.k or most / max(tokens_of(layer.tokens), 1)
    keeps = training or extra.counts is not None
    if asked.strategy == "auto" and (is_sliced(n) or (keeps and k > hybrid.most_of_each(n))):
        # the hybrid format has no room for them
        return asked._replace(strategy="dense")
    if is_sliced(n):
        of = f"{name}: the k largest are of at most {geometry.MAX_NEURONS} neurons"
        raise NotImplementedError(f'{of}, got {n}; "auto" is dense')
    return asked


def _on_shards(
    function: Callable[..., Any], operands: Mapping[str, Tensor], mains: Any, return_aux: bool, how: How, extra: Extra
) -> Any:
    """Run ``function`` on DTensors: each rank runs it on its local parts."""
    from twell.call import sharding

    name = function.__name__
    if extra.choice is not None or extra.counts is not None:
        raise TypeError(f'{name}: "batchtopk", bandwidth and counts take plain tensors, got DTensors')
    if mains is not None:
        raise NotImplementedError(f"{name}: main_grads are those of plain weights, got DTensors")
    options: dict[str, Any] = {"strategy": how.strategy, "invariant": how.invariant, "compression": how.compression}
    options |= {"dense": how.strategy == "dense", "return_aux": return_aux, **how.activation.options()}
    y, figures = sharding.ffn(name, function, operands, **options)
    return y if figures is None else (y, Aux(*figures))


def _gathered(facts: Facts, operands: Mapping[str, Tensor], layer: Layer) -> Facts:
    """The facts of a call that is not plain, or that the kernels may refuse."""
    gives = layer.gate is not None
    x, (n, k) = layer.tokens, layer.w_down.shape[::-1] if gives else layer.w_gate.shape
    own: dict[str, Any] = {"n": n, "k": k, "dtype": x.dtype, "device": x.device.type, "sliced": not gives}
    own |= {"onnx": modes.to_onnx(), "exporting": modes.exporting(), "tracing": modes.tracing(tokens_of(x))}
    own["needing"], own["transformed"] = tuple(needing_grad(operands)), modes.transform_of(operands, facts.training)
    own["overridden"] = overridden(operands) or ("DTensors" if gives and sharded(operands) else "")
    return facts._replace(**own)


def _say(facts: Facts, route: Route) -> None:
    """Say once that a call runs dense against what its caller may expect."""
    if modes.compiling() or route.strategy != "dense" or facts.strategy == "dense":
        return
    if facts.overridden:
        got = f"{facts.overridden} may make something else of PyTorch's operators than the sparse kernels do"
        warn_once(f"{facts.name} runs dense: {got}")
    elif facts.strategy != "auto" or facts.invariant:
        info_once("float32 and float64 run dense, whatever strategy was named")


def _chosen(call: Call, layer: Layer, site: AutoStrategy | None, route: Route) -> Route:
    """The choice of "auto" by costs. An operator that is not called directly chooses itself."""
    if not call.training and not call.direct:
        return route
    x, gives, copied = layer.x, layer.gate is not None, not layer.scaled and copies_down(layer.w_down)
    k, n = layer.w_down.shape
    if x is None:
        # what has its shape
        x = layer.gate[..., :1].expand(*layer.gate.shape[:-1], k)
    # few tokens of other layers have no kernel of their own
    one_pass = not (call.how.activation.k or gives) and (call.how.fast or layer.plain)
    one_pass = one_pass and call.extra.choice is None and call.extra.counts is None
    of_layer = n, layer.w_up is not None, call.training, copied
    if call.training and site is not None and modes.tracing(m := tokens_of(x)):
        route = route_of(site.trace(m))
    elif site is not None:
        route = site.begin(x, *of_layer, False, one_pass, layer.scaled)
    else:
        route = without_site(x, *of_layer, one_pass, layer.scaled)
    # a site that others share may know the screen
    return route._replace(screen=False) if gives else route
