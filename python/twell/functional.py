"""The functions users call: validated once, autocast, leading dimensions, strategy. Everything below trusts them."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import ops, tuning
from twell._runtime import format, specs
from twell.packed import PackedTwell

Strategy = Literal["auto", "row", "union", "dense"]

_PACKED_DTYPES = (torch.bfloat16, torch.float16)
_OPTIONAL = ("b_gate", "b_up", "b_down")


class Aux(NamedTuple):
    """Figures of one call, 0-d float32 tensors on its device; 0 where there are no tokens.

    l1: mean over tokens of the sum of |hidden state|; differentiable where the output is.
    l0: mean over tokens of the number of non-zeros after ReLU.
    """

    l1: Tensor
    l0: Tensor


@overload
def sparse_gated_ffn(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    strategy: Strategy = "auto",
    compression: int = 8,
    return_aux: Literal[False] = False,
) -> Tensor: ...


@overload
def sparse_gated_ffn(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    strategy: Strategy = "auto",
    compression: int = 8,
    return_aux: Literal[True],
) -> tuple[Tensor, Aux]: ...


def sparse_gated_ffn(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    strategy: Strategy = "auto",
    compression: int = 8,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, Aux]:
    """``(relu(x @ w_gate^T + b_gate) * (x @ w_up^T + b_up)) @ w_down^T + b_down``, on the non-zeros of the gate.

    Args:
        x: tokens [..., K]. Read in place if rows are 16-byte aligned with unit stride inside, else copied.
        w_gate, w_up: [N, K]. w_down: [K, N], as in nn.Linear; stored as the transposed view of a contiguous [N, K]
            tensor it is read in place, else copied at every call, which is logged. N neurons and K are multiples of 8,
            at most 65,536 and 16,384.
        b_gate, b_up: [N]. b_down: [K]. Optional.
        strategy: "row" gathers the weight rows of each token's non-zeros; "dense" is plain PyTorch, for any size and
            floating dtype, and has gradients; "auto" is "row"; "union" has no kernel yet.
        compression: 2, 4 or 8. A tile of 256 neurons takes 256 / compression words, and up to one less non-zeros before
            it is spilled. Speed depends on it, the result does not.
        return_aux: also return ``Aux(l1, l0)``.

    All tensors are bfloat16 or float16 and on one device: a GPU of compute capability 9.0 or the CPU. On the CPU
    float32 is taken too, and computed densely whatever the strategy, since the format stores 16-bit values. Under
    autocast, floating tensors other than float64 are cast to its dtype first, at every call.

    Returns y [..., K] of the dtype of x (under autocast: of autocast). The gate is rounded to that dtype, as in
    dense PyTorch, everything after it is fp32 until y. NaN and infinite gates propagate. Neurons whose gate is zero add
    nothing; only a non-finite weight row may make NaN of 0 * inf in tokens that do not fire it, as in dense PyTorch.

    Raises TypeError, ValueError or NotImplementedError naming what was got and expected; NotImplementedError where a
    gradient would be needed and ``strategy`` is not "dense".
    """
    name = "sparse_gated_ffn"
    t = _admit(name, x=x, w_gate=w_gate, w_up=w_up, w_down=w_down, b_gate=b_gate, b_up=b_up, b_down=b_down)
    x = t["x"]
    if _runs_dense(name, t, strategy, compression):
        gate = F.relu(F.linear(x, t["w_gate"], t.get("b_gate")))
        hidden = gate * F.linear(x, t["w_up"], t.get("b_up"))
        y = F.linear(hidden, t["w_down"], t.get("b_down"))
        return (y, _dense_aux(hidden, gate)) if return_aux else y

    tokens = x.reshape(-1, x.shape[-1])
    words, spill, stats = ops.gate_pack(tokens, t["w_gate"], t.get("b_gate"), compression)
    down = t["w_down"].t()
    y, l1 = ops.up_down(tokens, words, spill, t["w_up"], down, t.get("b_up"), t.get("b_down"), compression)
    y = y.reshape(x.shape)
    return (y, _sparse_aux(l1, stats)) if return_aux else y


@overload
def sparse_ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    strategy: Strategy = "auto",
    compression: int = 8,
    return_aux: Literal[False] = False,
) -> Tensor: ...


@overload
def sparse_ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    strategy: Strategy = "auto",
    compression: int = 8,
    return_aux: Literal[True],
) -> tuple[Tensor, Aux]: ...


def sparse_ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    strategy: Strategy = "auto",
    compression: int = 8,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, Aux]:
    """``relu(x @ w_up^T + b_up) @ w_down^T + b_down``, on the non-zeros of the hidden state.

    w_up is [N, K], w_down [K, N], b_up [N], b_down [K]. All else, errors included, is as in ``sparse_gated_ffn``.
    """
    name = "sparse_ffn"
    t = _admit(name, x=x, w_up=w_up, w_down=w_down, b_up=b_up, b_down=b_down)
    x = t["x"]
    if _runs_dense(name, t, strategy, compression):
        hidden = F.relu(F.linear(x, t["w_up"], t.get("b_up")))
        y = F.linear(hidden, t["w_down"], t.get("b_down"))
        return (y, _dense_aux(hidden, hidden)) if return_aux else y

    words, spill, stats = ops.gate_pack(x.reshape(-1, x.shape[-1]), t["w_up"], t.get("b_up"), compression)
    y, l1 = ops.down(words, spill, t["w_down"].t(), t.get("b_down"), compression)
    y = y.reshape(x.shape)
    return (y, _sparse_aux(l1, stats)) if return_aux else y


def pack(x: Tensor, w_gate: Tensor, b_gate: Tensor | None = None, *, compression: int = 8) -> PackedTwell:
    """``relu(x @ w_gate^T + b_gate)`` in the TwELL format: x [..., K], w_gate [N, K], b_gate [N] -> [..., N] packed.

    Tensors are bfloat16 or float16, on the CPU too. Not differentiable. Sizes, autocast and errors are as in
    ``sparse_gated_ffn``.
    """
    name = "pack"
    t = _admit(name, x=x, w_gate=w_gate, b_gate=b_gate)
    x = t["x"]
    _require_packable(name, t, compression)
    if x.dtype not in _PACKED_DTYPES:
        raise TypeError(f"{name}: dtype must be bfloat16 or float16, which the format stores, got {x.dtype}")
    _require_no_grad(name, t, "the format stores no gradient; call it under torch.no_grad()")
    tokens, n = x.reshape(-1, x.shape[-1]), t["w_gate"].shape[0]
    words, spill, stats = ops.gate_pack(tokens, t["w_gate"], t.get("b_gate"), compression)
    words, spill = (packed.reshape(*x.shape[:-1], packed.shape[1]) for packed in (words, spill))
    return PackedTwell(words, spill, stats, n, compression)


def _admit(name: str, **operands: Tensor | None) -> dict[str, Tensor]:
    """The operands that are not None, cast as autocast asks, after checking types, shapes, devices and dtypes."""
    present = {}
    for argument, value in operands.items():
        if not isinstance(value, Tensor):
            if value is None and argument in _OPTIONAL:
                continue
            raise TypeError(f"{name}: {argument} must be a tensor, got {type(value).__name__}")
        present[argument] = value

    x = present["x"]
    if x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type):
        # what autocast does to the operands of a linear layer
        dtype = torch.get_autocast_dtype(x.device.type)
        present = {
            a: t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for a, t in present.items()
        }
        x = present["x"]
    if x.dim() == 0:
        raise ValueError(f"{name}: x must be [..., K], got a scalar")
    if not x.is_floating_point():
        raise TypeError(f"{name}: x must have a floating dtype, got {x.dtype}")
    first = present["w_gate" if "w_gate" in present else "w_up"]
    if first.dim() != 2:
        raise ValueError(f"{name}: the first weight must be [N, K], got {list(first.shape)}")
    n, k = first.shape[0], x.shape[-1]
    shapes = {"w_gate": [n, k], "w_up": [n, k], "w_down": [k, n], "b_gate": [n], "b_up": [n], "b_down": [k]}
    for argument, value in present.items():
        if argument != "x" and list(value.shape) != shapes[argument]:
            raise ValueError(
                f"{name}: {argument} must be {shapes[argument]} (x has K = {k}, N = {n}), got {list(value.shape)}"
            )
        if value.device != x.device:
            raise ValueError(f"{name}: {argument} must be on {x.device} as x is, got {value.device}")
        if value.dtype != x.dtype:
            raise TypeError(f"{name}: {argument} must be {x.dtype} as x is, got {value.dtype}")
    return present


def _runs_dense(name: str, operands: dict[str, Tensor], requested: str, compression: int) -> bool:
    """Whether plain PyTorch computes this call; if not, every limit of the sparse path has been checked."""
    if tuning.strategy(requested) == "dense":
        return True
    x = operands["x"]
    _require_packable(name, operands, compression)
    _require_no_grad(
        name,
        operands,
        f'strategy="{requested}" has no gradient yet; use strategy="dense", or torch.no_grad() for inference',
    )
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return True
    if x.dtype not in _PACKED_DTYPES:
        raise TypeError(
            f"{name}: dtype must be bfloat16 or float16 (or float32 on the CPU or under autocast), got {x.dtype} "
            f'on {x.device.type}; strategy="dense" takes any'
        )
    return False


def _require_packable(name: str, operands: dict[str, Tensor], compression: int) -> None:
    x, weight = operands["x"], operands["w_gate" if "w_gate" in operands else "w_up"]
    n, k = weight.shape
    if compression not in format.COMPRESSIONS:
        raise ValueError(f"{name}: compression must be one of {format.COMPRESSIONS}, got {compression!r}")
    for letter, size, limit in (("K", k, specs.K_CLASSES[-1]), ("N", n, format.MAX_NEURONS)):
        if size == 0 or size % 8:
            raise ValueError(f"{name}: {letter} must be a positive multiple of 8 for the sparse kernels, got {size}")
        if size > limit:
            raise NotImplementedError(f"{name}: {letter} must be at most {limit} for the sparse kernels, got {size}")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(f"{name}: the sparse path runs on cuda and cpu, got {x.device.type}")


def _require_no_grad(name: str, operands: dict[str, Tensor], reason: str) -> None:
    if torch.is_grad_enabled():
        needing = [argument for argument, value in operands.items() if value.requires_grad]
        if needing:
            raise NotImplementedError(f"{name}: {', '.join(needing)} requires grad, but {reason}")


def _dense_aux(hidden: Tensor, gate: Tensor) -> Aux:
    l1 = hidden.abs().sum(dtype=torch.float32)
    return _per_token(l1, (gate != 0).sum(), hidden.shape[:-1].numel())


def _sparse_aux(l1: Tensor, stats: Tensor) -> Aux:
    return _per_token(l1.sum(), stats.select(2, 0).sum(), l1.shape[0])


def _per_token(l1: Tensor, nonzeros: Tensor, tokens: int) -> Aux:
    tokens = max(tokens, 1)
    return Aux(l1 / tokens, nonzeros.float() / tokens)
