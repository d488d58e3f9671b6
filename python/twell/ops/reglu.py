"""``reglu`` and ``reglu_backward``: the activation of a dense gated layer and its gradients, in one pass each.

hidden = relu(gate) * up for tensors of one shape, or another activation of the family, and the gradients of gate and
up from that of hidden. Each result is computed in fp32 and rounded once; a NaN gate stays NaN and passes its gradient
on. So the bits on either device are those of torch's own operators and autograd there, except for "relu2", whose square
they round, too. On the CPU any floating dtype, on CUDA bfloat16 or float16.

upstream is the gradient of hidden, d_gate and d_up are those of gate and up; ``activation`` and ``threshold`` are the
layer's.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from twell.base.activation import RELU, Activation, activation_of, threshold_pair
from twell.choose import tuning
from twell.ops.library import ACTIVATION, aligned, check, register
from twell.runtime import modes, resolve
from twell.runtime.program import launch

# Values of a launch: offsets in bytes fit in 32 bits.
PIECE = 1 << 29


def output(gate: Tensor, up: Tensor) -> Tensor:
    """Uninitialised hidden state, contiguous; raises unless gate and up have one shape and dtype."""
    check("up", up, gate.shape, gate.dtype)
    return gate.new_empty(gate.shape)


def gradients(upstream: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised gradients of gate and up; raises unless all operands have one shape and dtype."""
    check("upstream", upstream, gate.shape, gate.dtype)
    return output(gate, up), output(gate, up)


def _fake(gate: Tensor, up: Tensor, name: str, threshold: float) -> Tensor:
    activation_of(name, threshold).level(gate.dtype)
    return output(gate, up)


def _backward_fake(upstream: Tensor, gate: Tensor, up: Tensor, name: str, threshold: float) -> tuple[Tensor, Tensor]:
    activation_of(name, threshold).level(gate.dtype)
    return gradients(upstream, gate, up)


def pays(like: Tensor, values: int) -> bool:
    """Whether the operators take a dense layer's gate of so many values, and save time; loads their kernels."""
    return (
        like.is_cuda
        and like.dtype in (torch.bfloat16, torch.float16)
        and (values >= tuning.FUSED_ELEMENTS or modes.capturing(like))
        and resolve.launchable(
            like.device.index, tuning.reglu(like.dtype, backward=False), tuning.reglu(like.dtype, backward=True)
        )
    )


def _cpu(gate: Tensor, up: Tensor, name: str, threshold: float) -> Tensor:
    form = activation_of(name, threshold)
    return output(gate, up).copy_(form.hidden(form.after(gate), up))


def _cuda(gate: Tensor, up: Tensor, name: str, threshold: float) -> Tensor:
    return on_cuda(gate, up, activation_of(name, threshold))


def on_cuda(gate: Tensor, up: Tensor, activation: Activation = RELU, inplace: bool = False) -> Tensor:
    """``reglu`` on the current device; ``inplace``: in the memory of up, unless both are halves of one product."""
    spec, form = tuning.reglu(gate.dtype, backward=False), (activation.code(), threshold_pair(activation, gate.dtype))
    if _are_halves(gate, up):
        hidden = output(gate, up)
        memory = ((gate.shape[0] - 1) * gate.stride(0) + gate.shape[1],)
        vectors = (half.as_strided(memory, (1,)) for half in (gate, up))
        launch(spec, *vectors, hidden.view(-1), gate.shape[1], gate.stride(0), *form)
        return hidden
    if inplace:
        # each thread has read what it overwrites
        hidden = up = aligned(up)
    else:
        hidden = output(gate, up)
    for operands in _pieces(gate, up, hidden):
        # one row; the width is a multiple of eight
        launch(spec, *operands, PIECE, 0, *form)
    return hidden


def _are_halves(gate: Tensor, up: Tensor) -> bool:
    """Whether gate and up [M, N] have rows of whole vectors, equally far apart, and one launch takes them."""
    return (
        gate.dim() == 2
        and 0 < gate.numel() <= PIECE
        and gate.stride() == up.stride()
        and gate.stride(1) == 1
        and gate.stride(0) > gate.shape[1]
        and gate.stride(0) % 8 == gate.shape[1] % 8 == gate.data_ptr() % 16 == up.data_ptr() % 16 == 0
        and gate.shape[0] * gate.stride(0) < 2**31
    )


def _backward_cpu(upstream: Tensor, gate: Tensor, up: Tensor, name: str, threshold: float) -> tuple[Tensor, Tensor]:
    d_gate, d_up = gradients(upstream, gate, up)
    by_gate, by_up = derivatives(upstream, gate, up, activation_of(name, threshold))
    return d_gate.copy_(by_gate), d_up.copy_(by_up)


def derivatives(upstream: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up by torch's operators."""
    active = activation.after(gate)
    d_gate, d_up = activation.gradients(upstream, active, up)
    assert d_up is not None
    return torch.ops.aten.threshold_backward(d_gate, active, 0), d_up


def _backward_cuda(upstream: Tensor, gate: Tensor, up: Tensor, name: str, threshold: float) -> tuple[Tensor, Tensor]:
    d_gate, d_up = gradients(upstream, gate, up)
    activation, spec = activation_of(name, threshold), tuning.reglu(gate.dtype, backward=True)
    form = activation.code(), threshold_pair(activation, gate.dtype)
    for operands in _pieces(upstream, gate, up, d_gate, d_up):
        launch(spec, *operands, *form)
    return d_gate, d_up


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same parts of tensors of one shape, as vectors."""
    vectors = tuple([aligned(tensor).view(-1) for tensor in tensors])
    if 0 < vectors[0].numel() <= PIECE:
        return iter((vectors,))
    return zip(*(torch.split(vector, PIECE) for vector in vectors)) if vectors[0].numel() else iter(())


reglu = register(f"reglu(Tensor gate, Tensor up, {ACTIVATION}) -> Tensor", fake=_fake, cpu=_cpu, cuda=_cuda)
reglu_backward = register(
    f"reglu_backward(Tensor upstream, Tensor gate, Tensor up, {ACTIVATION}) -> (Tensor d_gate, Tensor d_up)",
    fake=_backward_fake,
    cpu=_backward_cpu,
    cuda=_backward_cuda,
)
