"""``reglu`` and ``reglu_backward``: the activation of a dense gated layer and its gradients, in one pass each.

hidden = relu(gate) * up for tensors of one shape, and the gradients of gate and up from that of hidden. On either
device the bits are those of torch's own operators and autograd there: each product is rounded once; a NaN gate stays
NaN and passes its gradient on. On the CPU any floating dtype, on CUDA bfloat16 or float16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from twell import tuning
from twell._runtime import nvtx
from twell.ops import library
from twell.ops.library import check, flat, launch, register

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


def pays(gate: Tensor) -> bool:
    """Whether the operators take the gate of a dense layer, and save time; loads their kernels."""
    return (
        gate.is_cuda
        and gate.dtype in (torch.bfloat16, torch.float16)
        and (gate.numel() >= tuning.FUSED_ELEMENTS or torch.cuda.is_current_stream_capturing())
        and library.launchable(
            gate.device.index, tuning.reglu(gate.dtype, backward=False), tuning.reglu(gate.dtype, backward=True)
        )
    )


def _cpu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.mul(torch.relu(gate), up, out=output(gate, up))


def on_cuda(gate: Tensor, up: Tensor) -> Tensor:
    """``reglu`` on the current device."""
    hidden = output(gate, up)
    spec = tuning.reglu(gate.dtype, backward=False)
    for operands in _pieces(flat(gate), flat(up), hidden.view(-1)):
        launch(spec, *operands)
    return hidden


def _backward_cpu(upstream: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    d_gate, d_up = gradients(upstream, gate, up)
    active = torch.relu(gate)
    torch.mul(upstream, active, out=d_up)
    return d_gate.copy_(torch.ops.aten.threshold_backward(upstream * up, active, 0)), d_up


def _backward_cuda(upstream: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    d_gate, d_up = gradients(upstream, gate, up)
    spec = tuning.reglu(gate.dtype, backward=True)
    for operands in _pieces(flat(upstream), flat(gate), flat(up), d_gate.view(-1), d_up.view(-1)):
        launch(spec, *operands)
    return d_gate, d_up


def _pieces(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same parts of vectors of one length."""
    return zip(*(torch.split(vector, PIECE) for vector in vectors)) if vectors[0].numel() else iter(())


reglu = register(
    "reglu(Tensor gate, Tensor up) -> Tensor", fake=output, cpu=_cpu, cuda=on_cuda, instead="twell.sparse_gated_ffn"
)
reglu_backward = register(
    "reglu_backward(Tensor upstream, Tensor gate, Tensor up) -> (Tensor d_gate, Tensor d_up)",
    fake=gradients,
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    instead="twell.sparse_gated_ffn",
    phase=nvtx.BACKWARD,
)
