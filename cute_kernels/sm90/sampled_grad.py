"""Gradients at the non-zeros of a hybrid gate, see common/sampled.py: the kernel of sampled_up.py on dy and w_down."""

from typing import Any

from ..common.sampled import SampledGradForm, grad_arguments
from ..specs import SampledGradSpec
from .sampled_up import SampledProduct


class SampledGrad(SampledProduct, SampledGradForm):
    """The gradients."""


def signature(spec: SampledGradSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    return SampledGrad(spec), grad_arguments(spec)
