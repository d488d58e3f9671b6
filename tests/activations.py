"""Every layer of the ReLU family, its formula, and values that tell bits apart, for tests on the CPU and the GPU."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from twell import testing

# integers have gates of up to 40: the threshold cuts off some of them, and is one of them
FAMILY = {"relu": 0.0, "relu2": 0.0, "drelu": 0.0, "fatrelu": 3.0}
# activation, its threshold, gated or not
LAYERS = [(name, t, gated) for (name, t), gated in itertools.product(FAMILY.items(), (True, False))]
LAYERS.remove(("drelu", 0.0, False))
EVERY = pytest.mark.parametrize(("name", "threshold", "gated"), LAYERS, ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
BIASES = "gate up down"


def form(name: Any, threshold: float) -> dict[str, Any]:
    return {"activation": name, "threshold": threshold}


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.relu(gate) * up


def dense_layer(p: testing.FFN, **options: Any) -> Any:
    biases = {"b_gate": p.b_gate, "b_up": p.b_up, "b_down": p.b_down}
    return twell.sparse_gated_ffn(*p[:3], p.w_down.t(), **biases, strategy="dense", **options)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    equal = actual.contiguous().view(bits) == expected.contiguous().view(bits)
    return bool((equal | (actual.isnan() & expected.isnan())).all())


def every_value(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dh, gate and up [16, 65536]: each 16-bit pattern as a gate; zeros, infinities, NaN and extremes beside it."""
    gate = torch.arange(1 << 16).to(torch.int16).view(dtype).expand(16, -1)
    info = torch.finfo(dtype)
    special = [0.0, -0.0, 1.0, -3.0, torch.inf, -torch.inf, torch.nan, info.tiny, -info.tiny / 4, info.max, 1 / 3]
    others = torch.tensor(special).to(dtype)
    generator = torch.Generator().manual_seed(0)
    dh, up = (others[torch.randint(len(special), gate.shape, generator=generator)] for _ in range(2))
    return dh, gate.contiguous(), up
