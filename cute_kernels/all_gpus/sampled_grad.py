"""Gradients at the non-zeros of a hybrid gate, see common/sampled.py: the kernel of a family's sampled_up.py on dy and
w_down.
"""

from typing import Any

from ..common.sampled import SampledGradForm, grad_arguments
from ..sm80 import sampled_up as portable
from ..sm90 import sampled_up as hopper
from ..specs import SM90, SampledGradSpec


class HopperGrad(hopper.SampledProduct, SampledGradForm):
    """The gradients on sm_90a."""


class PortableGrad(portable.SampledProduct, SampledGradForm):
    """The gradients on every GPU since sm_80."""


def signature(spec: SampledGradSpec) -> tuple[Any, tuple[Any, ...]]:
    return (HopperGrad if spec.family == SM90 else PortableGrad)(spec), grad_arguments(spec)
