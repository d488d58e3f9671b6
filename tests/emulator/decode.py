"""The kernel for whole layers of few tokens on the emulator, against the formula of a Case."""

import torch
from torch import Tensor

from tests.emulator.checks import NONE, strided
from twell import testing
from twell._activation import activation_of, threshold_pair
from twell._runtime import specs
from twell.float8 import Float8
from twell.ops.library import launch
from twell.testing.case import Case
from twell.testing.formula import answers
from twell.testing.operands import build, in_e4m3, level_of


def layer(line: str, columns: int, cluster: int, clusters: int, shared: int = 0) -> None:
    """Integers in rows with NaN between; h is rounded. ``shared``: neurons of a layer beside experts, of weight 1."""
    case = Case.of(f"{line} strategy=union")
    tokens = next(most for most in specs.DECODE_TOKENS if case.m <= most)
    kind = "experts" if case.kind == "experts" else "gated" if case.gated else "plain"
    dtype = specs.E4M3 if case.scales else "bfloat16" if case.dtype == "bf16" else "float16"
    spec = specs.DecodeSpec(dtype, kind, columns, cluster, tokens)
    o = build(case, torch.device("cpu"))
    form = activation_of(case.activation, 0.0 if case.by_neuron else case.threshold, case.gated)
    none, right = NONE.to(case.torch_dtype), answers(case, o)["y"].value
    first, biases = o[f"w_{case.first}"], [o.get(f"b_{name}", none) for name in (case.first, "up", "down")]
    if case.by_neuron:
        levels = level_of(case).expand(case.n)
        biases[0] = torch.cat([biases[0] if len(biases[0]) else torch.zeros_like(levels), levels])
    y = torch.full((case.m, case.k + 8), torch.nan, dtype=case.torch_dtype)[:, : case.k]
    parts = torch.full((clusters * cluster * (columns * tokens + 2),), torch.nan)
    aux = torch.full((2,), torch.nan)
    how = threshold_pair(form, case.torch_dtype), form.code()
    last = biases[2], parts, y, clusters
    if case.scales:
        weights = [first, o["w_up"] if case.gated else first]
        scaled = [part for each in (in_e4m3(case, o["x"]), *weights) for part in _bytes(each)]
        scaled += _bytes(o["w_down"], by_columns=True)
        launch(spec, *scaled, biases[0], biases[1] if case.gated else none, *how, *last)
        testing.assert_same(y, right.to(y.dtype), line)
        return
    matrices = [strided(t) for t in (first.flatten(0, -2), o["w_down"].mT.flatten(0, -2))]
    x = strided(o["x"])
    if kind == "experts":
        beside = Case("layer", m=case.m, n=shared or 8, k=case.k, gated=False, activation=case.activation)
        own = build(beside, torch.device("cpu"))
        pair = [strided(t)[:shared] for t in (own["w_up"], own["w_down"].t())]
        if shared:
            right = right + answers(beside, {**own, "x": o["x"]})["y"].value
        words: Tensor = o["expert_ids"].long().view(torch.int32).flatten()[::2]
        sizes = case.n, case.n, case.n, case.experts
        routes = words, o["weights"].flatten()
        launch(spec, x, matrices[0], pair[0], matrices[1], pair[1], *sizes, *routes, none, none, *how, *last)
    else:
        up = strided(o["w_up"]) if case.gated else matrices[0]
        last = biases[2], parts, aux, y, clusters
        launch(spec, x, matrices[0], up, matrices[1], biases[0], biases[1] if case.gated else none, *how, *last)
    testing.assert_same(y, right.to(y.dtype), line)


def _bytes(matrix: Float8, by_columns: bool = False) -> tuple[Tensor, Tensor]:
    """A matrix as the kernel takes it, bytes in longer rows, and scales of its rows, or of those it has as columns."""
    values = matrix.values.view(torch.uint8)
    return strided(values.t() if by_columns else values, 32), matrix.by_rows()
