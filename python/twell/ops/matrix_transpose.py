"""``matrix_transpose``: a contiguous transposed copy of a matrix.

Kernels read and write down weights by rows of neurons; ``nn.Linear`` stores rows of features. Values of 16 bits are
copied at the memory rate, five times as fast as by PyTorch (H200, 5,632 x 2,048: 14.6 against 76 us).

matrix [R, C] becomes [C, R].
"""

from torch import Tensor

from twell.ops.library import check_rank, register, transpose


def outputs(matrix: Tensor) -> Tensor:
    """Uninitialised [C, R] for ``matrix`` [R, C], contiguous."""
    check_rank("matrix", matrix)
    return matrix.new_empty((matrix.shape[1], matrix.shape[0]))


def _copy(matrix: Tensor) -> Tensor:
    return transpose(matrix, outputs(matrix))


matrix_transpose = register("matrix_transpose(Tensor matrix) -> Tensor", fake=outputs, cpu=_copy, cuda=_copy)
