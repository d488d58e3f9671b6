"""``sparse_experts``: the routed experts of a mixture, on the non-zeros of their gates."""

from typing import Any, Literal

from torch import Tensor

from twell import ops
from twell.base.activation import ActivationName, activation_of
from twell.base.arguments import require, require_flag
from twell.call.admission import needing_grad, require_fitting, strided
from twell.call.quantised import is_quantised, records, scaled
from twell.choose.plan import PACKED_DTYPES, Facts, unpackable
from twell.ops.experts import Experts, dense, require_how
from twell.ops.float8 import Float8
from twell.ops.operands import Layer
from twell.ops.pairs import check_ids, check_routes
from twell.runtime import geometry, modes

_NAME = "sparse_experts"
_SHARED = ("shared_up", "shared_down")


def sparse_experts(
    x: Tensor | Float8,
    w_up: Tensor | Float8,
    w_down: Tensor | Float8,
    expert_ids: Tensor,
    weights: Tensor,
    *,
    activation: ActivationName = "relu",
    threshold: float = 0.0,
    w_gate: Tensor | Float8 | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
    strategy: Literal["auto", "dense", "row"] = "auto",
    invariant: bool = False,
    compression: int = 8,
) -> Tensor:
    """``y[t] = sum over j of weights[t, j] * (act(x[t] @ w_up[e]^T) @ w_down[e]^T)`` with e = expert_ids[t, j].

    With ``w_gate`` an expert is ``(act(x[t] @ w_gate[e]^T) * (x[t] @ w_up[e]^T)) @ w_down[e]^T``.

    Args:
        x: tokens [..., K].
        w_up, w_gate: [E, N, K], of up to 1,024 experts. N is a multiple of 8 up to 65,536, K one up to 16,384.
        w_down: [E, K, N], as in models. "row" reads it in place if it is the transposed view of a tensor [E, N, K]
            (``rows.transpose(1, 2)``), else it copies all of it at each call, after a warning.
        expert_ids: int32 or int64 [..., k], k up to 32. Ids may repeat; -1 is no expert, and adds nothing.
        weights: floating [..., k], those of the router; they are used in fp32.
        shared: w_up [S, K] and w_down [K, S] of a shared expert, which all tokens run with weight 1; without ``w_gate``
            of 16 bits or wider and without ``invariant`` alone. One pass has it, too; else it runs by PyTorch's
            operators, which round its hidden states, and y once more.
        activation, threshold: as in ``sparse_gated_ffn``, "relu2" for the experts of Nemotron; "drelu" needs a gate.
        strategy: "row" reads the rows of non-zeros, as is best for few tokens of each expert; it needs a GPU of compute
            capability 9.0, or a CPU. Few tokens take one pass (docs/kernels.md, "decode"). "dense" is grouped products
            of PyTorch, and in other dtypes than bfloat16, and for 1,024 experts, for which it has none, a loop that
            waits for the GPU. "auto" on such a GPU is "row" for few tokens in one pass, for up to 40 pairs of a token
            and an expert per expert, or with a gate for up to 3 (e4m3: for up to 96, or none), and where "dense" waits,
            if w_down lies by rows; else it is "dense".
        invariant: on a GPU give a token the same bits whatever the other tokens are, by "row".
        compression: of the packed gates: 2, 4 or 8.

    Returns y [..., K] of the dtype of x. By "row" gates are rounded to that dtype, all experts of a token are added in
    fp32, in one order, and rounded once. Hidden states are rounded in one pass, and on a GPU without a gate, unless
    their activation is "relu2" in float16; else they stay fp32. "dense" rounds them and the result of each expert, too.

    "row" takes bfloat16 and float16, and has no gradients: where one is needed, "auto" is "dense", and "row" raises
    NotImplementedError. An id below -1 or of E or more raises ValueError on a CPU; on a GPU, which reads the low 32
    bits, it adds nothing, as a look at it would be a wait. In one pass a down row that is not finite may make NaN of
    all tokens of the call, and a weight that is not finite adds nothing where no neuron fires. Raises ValueError or
    TypeError for operands that do not fit each other.
    Source: Nemotron 3 (NVIDIA, 2025), whose experts have squared ReLU.
    """
    require_flag("invariant", invariant)
    require_how(strategy, invariant)
    geometry.words_per_tile(compression)
    act = activation_of(activation, threshold, w_gate is not None)
    if act.moves:
        raise TypeError(f"{_NAME}: threshold must be a number, got a tensor")
    for name, operand in (("expert_ids", expert_ids), ("weights", weights)):
        require(f"{_NAME}: {name}", operand, Tensor, "a tensor")
    matrices: Any = (w_gate, w_up, w_down) if w_gate is not None else (w_up, None, w_down)
    quantised = is_quantised(x, matrices)
    if shared is not None:
        _require_shared(shared, w_gate, invariant, quantised)
    if quantised:
        t = {}
        operands = scaled(_NAME, x, records(_NAME, matrices), w_gate is not None, routes=(expert_ids, weights))
    else:
        named = Layer(x, *matrices).named(w_gate is not None)
        t = strided(_NAME, {**named, **dict(zip(_SHARED, shared or ()))}, Layer._fields[4:7])
        _check(t, expert_ids, weights)
        operands = Layer.of(t)
    tokens, first, second, down = operands[:4]
    check_routes(f"{_NAME}: expert_ids", expert_ids, tokens.shape[:-1], first.shape[0])
    if not weights.is_floating_point() or weights.shape != expert_ids.shape:
        expected = f"floating {list(expert_ids.shape)}"
        raise ValueError(f"{_NAME}: weights must be {expected}, got {weights.dtype} {list(weights.shape)}")
    if expert_ids.device.type == "cpu" and not modes.tracing(0):
        check_ids(f"{_NAME}: expert_ids", expert_ids, first.shape[0])
    ids = expert_ids.reshape(-1, expert_ids.shape[-1])
    matrices = tokens.reshape(-1, tokens.shape[-1]), first, second, down.transpose(1, 2)
    beside = (t["shared_up"], t["shared_down"].t()) if shared is not None else (None, None)
    layer = Experts._make((*matrices, ids, weights.reshape(ids.shape), *beside, *operands[8:]))
    if not quantised:
        needing = needing_grad({**t, "weights": weights})
        plain = tokens.dtype in PACKED_DTYPES and not needing and not modes.transforming()
        refusal = unpackable(Facts(_NAME, n=first.shape[1], k=tokens.shape[-1]), instead="")
        if (refusal or not plain) and not invariant and strategy != "row":
            return dense(layer, act).view(tokens.shape)
        instead = "" if invariant else '; strategy="dense" takes it'
        if not plain:
            got = f"{tokens.dtype}{' and operands that require grad' if needing else ''}{instead}"
            what = '"row" takes bfloat16 and float16 without gradients and transforms'
            raise NotImplementedError(f"{_NAME}: {what}, got {got}")
        if refusal:
            raise refusal.kind(refusal.message + instead)
    y: Tensor = ops.experts(*layer[:5], layer.weights.float(), compression, strategy, *act, invariant, *layer[6:])
    return y.view(tokens.shape)


def _require_shared(shared: object, w_gate: object, invariant: bool, quantised: bool) -> None:
    """Raise unless ``shared`` is two tensors, of experts without a gate."""
    if not isinstance(shared, tuple) or len(shared) != 2 or not all(isinstance(each, Tensor) for each in shared):
        parts = [type(each).__name__ for each in shared] if isinstance(shared, (tuple, list)) else ""
        raise TypeError(f"{_NAME}: shared must be a tuple of two tensors, got {type(shared).__name__} {parts}".rstrip())
    if w_gate is not None:
        raise NotImplementedError(f"{_NAME}: shared goes with experts without a gate, got w_gate")
    if invariant:
        instead = "twell.sparse_ffn(..., invariant=True) computes it beside"
        raise NotImplementedError(f"{_NAME}: shared must be None with invariant=True; {instead}")
    if quantised:
        raise NotImplementedError(f"{_NAME}: shared goes with weights of 16 bits or wider, got e4m3")


def _check(t: dict[str, Tensor], *routes: Tensor) -> None:
    x, w_up = t["x"], t["w_up"]
    if not x.dim() or not x.shape[-1] or not x.is_floating_point() or x.dtype.itemsize < 2:
        raise ValueError(f"{_NAME}: x must be [..., K] of at least 16-bit floats, got {x.dtype} {list(x.shape)}")
    if w_up.dim() != 3:
        raise ValueError(f"{_NAME}: w_up must be [E, N, K], got {list(w_up.shape)}")
    (count, n, _), k, most = w_up.shape, x.shape[-1], t.get("shared_up", x).shape[:1]
    shapes = {"x": [*x.shape], "w_up": [count, n, k], "w_gate": [count, n, k], "w_down": [count, k, n]}
    shapes |= {"shared_up": [*most, k], "shared_down": [k, *most]}
    require_fitting(_NAME, t, shapes)
    devices = {str(operand.device) for operand in (x, *routes)}
    if len(devices) > 1:
        raise ValueError(f"{_NAME}: operands must be on one device, got {' and '.join(sorted(devices))}")
