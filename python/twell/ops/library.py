"""Registration of operators, checks of operands and their layout for kernels."""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from twell.choose import tuning
from twell.ops.operands import Layer, Scaled
from twell.runtime import device, modes, specs
from twell.runtime.log import warn_once
from twell.runtime.program import ALIGNMENT, Program, View, launch

Implementation = Callable[..., Any]
# a dtype and the lengths of the dimensions
Shape = tuple[Any, ...]

_LIBRARY = torch.library.Library("twell", "DEF")  # type: ignore[no-untyped-call]

# TMA and 16-byte vector loads: row stride in 16-bit elements.
STRIDE_MULTIPLE = 8

# Operands in schemas: those of a layer, which may have a given gate in place of the first projection; its activation.
LAYER = "Tensor? x, Tensor? w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, Tensor? b_down"
ACTIVATION = 'str activation="relu", float threshold=0.0'

# Dtypes that TwELL stores.
STORED_DTYPES = tuple(getattr(torch, name) for name in specs.DTYPES)


def register(schema: str, *, fake: Implementation, cpu: Implementation, cuda: Implementation) -> torch._ops.OpOverload:
    """Define an operator of library ``twell`` and return its overload.

    ``fake`` returns outputs of the right shape; ``cpu`` and ``cuda`` compute. All three take all arguments of the
    schema, and refuse an input that has a forward-mode tangent, or that requires grad while grad mode is on. They do so
    themselves because an Autograd kernel in Python would add half to the cost of every call (4.4 us against 2.8, torch
    2.13).
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    overload = getattr(torch.ops.twell, name).default
    complete = functools.partial(_complete, overload)
    for device_type, implementation in (("CPU", _without_autocast(cpu)), ("CUDA", on_device(cuda))):
        _LIBRARY.impl(name, complete(implementation), device_type)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"twell::{name}", _on_one_device(name, complete(fake)), lib=_LIBRARY)
    # what ``help`` shows: the docstring of the operator's file
    overload.__doc__ = f"{sys._getframe(1).f_globals['__doc__']}\n{overload._schema}"
    return overload  # type: ignore[no-any-return]


def _complete(overload: torch._ops.OpOverload, implementation: Implementation) -> Implementation:
    """Refuse inputs with derivatives, and add the arguments with defaults that the dispatcher leaves out."""
    name, defaults = overload._schema.name.replace("::", "."), [a.default_value for a in overload._schema.arguments]

    def complete(*arguments: Any) -> Any:
        if modes.transforming() and any(isinstance(a, Tensor) and modes.has_tangent(a) for a in arguments):
            raise NotImplementedError(
                f"torch.ops.{name} has no derivative: expected no input with a forward-mode tangent, got one; "
                'the functions of twell take it with strategy="dense"'
            )
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
            raise NotImplementedError(
                f"torch.ops.{name} has no gradient: expected no input that requires grad while grad mode is on; "
                "call a function of twell instead, or this under torch.no_grad()"
            )
        return implementation(*arguments, *defaults[len(arguments) :])

    return complete


def _on_one_device(name: str, fake: Implementation) -> Implementation:
    """Refuse operands of several devices: torch calls a fake for real operands, too, if one of them is on meta."""

    def on_one_device(*arguments: Any) -> Any:
        devices = {str(a.device) for a in arguments if isinstance(a, Tensor)}
        if len(devices) > 1:
            raise ValueError(
                f"torch.ops.twell.{name}: operands must be on one device, got {' and '.join(sorted(devices))}"
            )
        return fake(*arguments)

    return on_one_device


def _without_autocast(implementation: Implementation) -> Implementation:
    """Switch autocast off: it would lower the fp32 accumulation of the CPU path, which uses torch's operators."""

    def without_autocast(*arguments: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return implementation(*arguments)

    return without_autocast


def on_device(implementation: Implementation) -> Implementation:
    """Make the device of the first tensor the current one."""

    def on_device(*arguments: Any) -> Any:
        # x may be absent
        first = arguments[0] if arguments[0] is not None else next(filter(torch.is_tensor, arguments))
        index = first.device.index
        if index == torch.cuda.current_device():
            # the context costs 2 us
            return implementation(*arguments)
        with torch.cuda.device(index):
            return implementation(*arguments)

    return on_device


def is_direct(x: Tensor) -> bool:
    """Whether to call operators without the dispatcher, 6 us: nothing records them, and x is on the current GPU."""
    return x.is_cuda and not modes.recorded() and x.device.index == torch.cuda.current_device()


def rows(matrix: Tensor) -> Tensor:
    """``matrix`` [R, C] with aligned rows of unit stride, as kernels read it; a copy if it is laid out otherwise.

    Kernels find rows by 32-bit offsets of 16 bytes, so rows that are spread over more than 64 GB are copied, too.
    NotImplementedError where even a copy is larger.
    """
    if has_rows(matrix):
        if _are_near_rows(matrix.shape, matrix.stride()):
            return matrix
        if matrix.numel() > REACH:
            raise NotImplementedError(f"kernels take matrices of at most {REACH} values, got {matrix.numel()}")
        return matrix.clone(memory_format=torch.contiguous_format)
    return transpose(matrix.t(), matrix.new_empty(matrix.shape))


# Values over which a matrix may be spread.
REACH = 8 << 32


def _are_near_rows(shape: Sequence[int], strides: Sequence[int]) -> bool:
    return are_rows(shape, strides) and shape[0] * strides[0] <= REACH


def transpose(matrix: Tensor, out: Tensor) -> Tensor:
    """Fill the contiguous ``out`` [C, R] with ``matrix`` [R, C], and return it."""
    size, near = matrix.itemsize, has_rows(matrix)
    values = {2: torch.int16, 1: torch.uint8}.get(size)
    # 16 bytes in each direction; the kernel of bytes is of Hopper
    if matrix.is_cuda and matrix.numel() and values is not None and near:
        able = size == 2 or device.capability(matrix.device.index) == device.SM_90
        if able and all(length * size % 16 == 0 for length in (*matrix.shape, matrix.stride(0))):
            launch(specs.MatrixTransposeSpec(8 * size), matrix.view(values), out.view(values))
            return out
    return out.copy_(matrix.t())


def has_rows(matrix: Tensor) -> bool:
    """Whether kernels can read and write ``matrix`` [R, C] in place."""
    return are_rows(matrix.shape, matrix.stride()) and matrix.data_ptr() % ALIGNMENT == 0


def are_rows(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """``has_rows`` without the check of the address, which fake tensors and views of programs do not have."""
    return strides[1] == 1 and strides[0] % STRIDE_MULTIPLE == 0 and strides[0] >= shape[1]


def laid(layer: Layer) -> Layer:
    """``layer``, its x [..., K] and w_down [K, N], with copies of the operands that kernels cannot read in place."""
    x, w_gate, w_up, w_down, *biases, gate = layer.unscaled
    # behind a given gate alone there is no x
    own = None if x is None else tokens(x)
    first, up, given = (None if t is None else rows(t) for t in (w_gate, w_up, gate))
    in_place = _is_readable_down(w_down.shape, w_down.stride()) and w_down.data_ptr() % ALIGNMENT == 0
    down = w_down if in_place else rows(w_down.t()).t()
    return Layer(own, first, up, down, *map(aligned, biases))._replace(gate=given)


def tokens(x: Tensor) -> Tensor:
    """x [..., K] as programs take it: ``rows``, or contiguous with any number of dimensions."""
    if x.dim() == 2:
        return rows(x)
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return rows(x.reshape(-1, x.shape[-1]))


def _is_readable_down(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether programs take a down weight [K, N] as it is: by rows of neurons, or as nn.Linear stores it."""
    return _are_near_rows(shape[::-1], strides[::-1]) or are_rows(shape, strides)


def are_laid(layer: Layer) -> bool:
    """Whether ``laid`` copies none of such operands that are aligned."""
    matrices = all(t is None or _are_near_rows(t.shape, t.strides) for t in layer[:3])
    biases = all(t is None or t.strides == (1,) for t in layer[4:])
    return matrices and biases and _is_readable_down(layer.w_down.shape, layer.w_down.strides)


def down_rows(p: Program, w_down: Any) -> Any:
    """A down weight [K, N] as kernels read it, by rows [N, K]; a copy if it is stored as nn.Linear does."""
    if isinstance(w_down, Scaled) or are_rows(w_down.shape[::-1], w_down.strides[::-1]):
        return w_down.t()
    warn_once(
        "down_proj.weight (w_down) is stored as nn.Linear stores it, and the sparse kernels read a copy by rows, "
        'made at each call; twell.nn.set_down_layout(model, "rows") stores it so that they need none'
    )
    copy = p.scratch(w_down.dtype, *w_down.shape[::-1])
    p.launch(specs.MatrixTransposeSpec(), w_down._replace(dtype=torch.int16), copy._replace(dtype=torch.int16))
    return copy


def bias_view(p: Program, given: View | None, dtype: torch.dtype) -> View:
    """A bias as kernels take it: an empty vector stands for none."""
    return p.scratch(dtype, 0) if given is None else given


def unviewed(y: Tensor, shape: torch.Size) -> Tensor:
    """Return ``y`` in another shape, but not as a view: a hook of FSDP2 on a view is lost where that is changed."""
    if modes.jit_tracing():
        # an operator called by its name would make constants of the traced sizes
        return y.reshape(shape)
    return torch.ops.aten._unsafe_view.default(y, shape)  # type: ignore[no-any-return]


def no_view(y: Tensor) -> Tensor:
    """Return ``y`` not as a view, which F.linear with a bias and ``to_local`` may give; unchanged while compiling."""
    return unviewed(y, y.shape) if not modes.compiling() and y._is_view() else y


def new(like: Tensor, shapes: Iterable[Shape]) -> list[Any]:
    """Uninitialised tensors of these dtypes and shapes on the device of ``like``."""
    return [like.new_empty(shape, dtype=dtype) for dtype, *shape in shapes]


def blocks(m: int, size: int) -> int:
    """ceil(m / size), the length of outputs that have one element per ``size`` tokens.

    Graphs exported for a symbolic ``m`` get a new symbol, whose value comes with the output. torch compares every
    length with 1, and for an expression of ``m`` that would cut the range of ``m`` at ``size``. torch.compile gets the
    expression, and makes a graph for each side: with a new symbol it would record no CUDA graph.
    """
    if isinstance(m, torch.SymInt) and modes.exporting():
        return torch.library.get_ctx().new_dynamic_size()
    return -(-m // size)


def aligned(tensor: Tensor | None) -> Any:
    """A tensor, contiguous and at an aligned address as kernels read it; a copy if it is not."""
    if tensor is None:
        return None
    # one element is contiguous whatever its stride
    contiguous = tensor.stride(0) == 1 if tensor.dim() == 1 else tensor.is_contiguous()
    if contiguous and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def check_layer(layer: Layer) -> None:
    """Raise unless x [M, K], weights [N, K], b_gate [N] or [2 N], b_up [N] and b_down [K] fit, of a stored dtype."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer[:7]
    check_matrix("x", x)
    dtype, k, n = x.dtype, x.shape[1], -1
    for name, weight in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
        if weight is None:
            continue
        if n < 0:
            check_rank(name, weight)
            n = weight.shape[0]
            if n % STRIDE_MULTIPLE:
                raise ValueError(f"{name} must have a multiple of {STRIDE_MULTIPLE} rows, got {list(weight.shape)}")
        check(name, weight, (n, k), dtype)
    for name, bias, length in (("b_gate", b_gate, n), ("b_up", b_up, n), ("b_down", b_down, k)):
        if bias is not None:
            both = name == "b_gate" and bias.shape == (2 * n,)
            check(name, bias, (2 * n if both else length,), dtype)


def check_operands(layer: Layer) -> None:
    """Raise unless the operands of a layer without scales, or those behind a given gate and it, fit each other."""
    x, w_gate, w_up, w_down, _, _, b_down, gate = layer.unscaled
    if gate is None:
        if x is None or w_gate is None:
            raise ValueError("x and w_gate must be given without a gate, got None")
        check_layer(layer)
        return
    check_rank("gate", gate)
    for name in ("w_gate", "b_gate", *(("x", "b_up") if w_up is None else ())):
        if getattr(layer, name) is not None:
            said = "without w_up" if name in ("x", "b_up") else "with a given gate"
            raise ValueError(f"{name} must be None {said}, got a tensor")
    if w_up is None:
        check_matrix("w_down", w_down)
        if b_down is not None:
            check("b_down", b_down, w_down.shape[1:], w_down.dtype)
    else:
        if x is None:
            raise ValueError("x must be given with w_up, got None")
        check_layer(layer)
    m = gate.shape[0] if x is None else x.shape[0]
    check("gate", gate, (m, w_down.shape[0]), w_down.dtype)


def check_matrix(name: str, matrix: Tensor) -> None:
    """Raise unless ``matrix`` has a dtype that TwELL stores, and rows that kernels can read in pieces of 16 bytes."""
    check_rank(name, matrix)
    if matrix.dtype not in STORED_DTYPES:
        raise TypeError(f"{name} must be {' or '.join(map(tuning.dtype_name, STORED_DTYPES))}, got {matrix.dtype}")
    if matrix.shape[1] % STRIDE_MULTIPLE:
        raise ValueError(f"{name} must have rows of a multiple of {STRIDE_MULTIPLE} values, got {list(matrix.shape)}")


def check_rank(name: str, matrix: Tensor) -> None:
    """Raise ValueError unless ``matrix`` has two dimensions."""
    if len(matrix.shape) != 2:
        raise ValueError(f"{name} must have two dimensions, got {list(matrix.shape)}")


def check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless ``tensor`` has this shape, TypeError unless it has this dtype."""
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
