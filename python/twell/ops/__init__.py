"""The registered operators, ``torch.ops.twell.*``: one file each with schema, shapes, fake, CPU and CUDA code.

They take matrices, [M, K] tokens and [N, K] weights with one row per neuron, check shapes but not limits, and have no
gradient: ``twell.call.autograd`` joins forward to backward, and users come through ``twell.call.functional``.
"""

from twell.ops.experts import experts
from twell.ops.ffn import ffn, ffn_aux
from twell.ops.gate_pack import gate_pack
from twell.ops.hybrid_backward import hybrid_backward, hybrid_backward_accumulate
from twell.ops.hybrid_forward import hybrid_forward
from twell.ops.matrix_transpose import matrix_transpose
from twell.ops.reglu import reglu, reglu_backward
from twell.ops.unpack import unpack
from twell.ops.window import window

__all__ = [
    "experts",
    "ffn",
    "ffn_aux",
    "gate_pack",
    "hybrid_backward",
    "hybrid_backward_accumulate",
    "hybrid_forward",
    "matrix_transpose",
    "reglu",
    "reglu_backward",
    "unpack",
    "window",
]
