"""What torch is doing at this moment: the only place that asks it about traces, transforms, captures and modes.

Functions marked as constants are not traced: torch.compile calls them and keeps the answer. The mark is what
``torch.compiler.assume_constant_result`` sets, without importing Dynamo.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

_F = TypeVar("_F", bound=Callable[..., Any])

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)

compiling = torch.compiler.is_compiling
functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
# A context whose operators no dispatch mode sees. Selective checkpoints match those of a recomputation by their order.
unseen: Callable[[], Any] = _disable_current_modes
stream_captures: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)

# Whether an operator in a backward graph may add to views: before torch 2.13 inductor adds the offset of a view twice,
# and reads and writes beside it.
GRAPHS_ADD_TO_VIEWS = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"


def constant(function: _F) -> _F:
    """Let torch.compile call ``function`` while it traces, and keep the answer."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def exporting() -> bool:
    # torch 2.11 makes this true in all code that Dynamo traces, exported or not
    return torch.compiler.is_exporting()


@constant
def to_onnx() -> bool:
    # in traces alone, since the question imports the exporter
    traced = torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None
    return traced and torch.onnx.is_in_onnx_export()


def jit_tracing() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def tracing(m: Any) -> bool:
    """Whether this call is being traced; ``m``, its number of tokens, may be symbolic."""
    return compiling() or type(m) is not int or jit_tracing()


def has_tangent(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a dual number of forward-mode AD."""
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


# tracing opens the transforms that it traces
@constant
def transforming() -> bool:
    """Whether a transform of torch.func or a level of forward-mode AD is open."""
    return functorch() or forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether a transform or a trace of ``torch.jit`` is active, forward-mode AD among them."""
    return bool(functorch() or forward_ad._current_level >= 0 or torch._C._get_tracing_state())


def transform_of(operands: Mapping[str, Tensor], needing: bool) -> str:
    """Name what asks for a transform of torch.func or forward-mode AD; ``needing``: autograd wants gradients."""
    if not transforming():
        return ""
    if compiling():
        # tracing does not tell which tensors the transform wraps
        return "a call inside a transform"
    if functorch():
        for argument, value in operands.items():
            if is_wrapped(value):
                return f"{argument} of a transform of torch.func"
        if needing:
            return "gradients that pass a transform of torch.func"
    return next((f"{argument} with a forward-mode tangent" for argument, t in operands.items() if has_tangent(t)), "")


def is_wrapped(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def function_modes() -> list[type]:
    """The kinds of the TorchFunctionModes that are active."""
    return [type(torch._C._get_function_stack_at(i)) for i in range(torch._C._len_torch_function_stack())]


def dispatched() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0


def undisturbed() -> bool:
    """Whether operators do to plain tensors what they always do: no trace, transform, mode or autocast is active."""
    return not (
        torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or transformed()
    )


def is_in_memory(tensor: Tensor) -> bool:
    """Whether memory holds the values of a strided tensor: it has no negation pending, and is no zeros without any.

    The dispatcher makes such tensors real. Code that reads their memory without it must ask.
    """
    return not (tensor.is_neg() or tensor._is_zerotensor())


def eager(operands: Iterable[Tensor]) -> bool:
    """Whether these are plain tensors that hold values, and nothing traces or transforms the call."""
    return (
        not compiling()
        and all(type(t) in PLAIN_TENSORS and is_in_memory(t) for t in operands)
        and not jit_tracing()
        and not functorch()
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad._current_level < 0
    )


def recorded() -> bool:
    """Whether a profiler or a TorchDispatchMode sees operators."""
    return torch._C._autograd._profiler_enabled() or torch._C._len_torch_dispatch_stack() > 0


def profiling() -> bool:
    return torch._C._autograd._profiler_enabled()


def product_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """The dtype in which a linear layer on values of ``dtype`` computes: autocast's, if that is on."""
    # it leaves float64 as it is
    if device in ("cpu", "cuda") and dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return dtype


def capturing(x: Tensor) -> bool:
    """Whether the current stream captures a CUDA graph, for a call on ``x``."""
    return x.is_cuda and stream_captures()


def checkpointed() -> bool:
    """Whether activation checkpointing may run this call again: hooks take its saved tensors."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def data_parallel() -> Any:
    """The DistributedDataParallel that runs this call; None without one, or if its ``join`` lets ranks stop apart."""
    ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    return None if ddp is None or ddp._join_config.enable else ddp


def in_backward() -> bool:
    """Whether a backward pass runs this call, as the recomputation of a checkpoint."""
    return torch._C._current_graph_task_id() != -1
