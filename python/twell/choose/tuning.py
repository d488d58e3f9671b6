"""From a problem to the spec of the kernel that runs it."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from twell.runtime import device, geometry, specs


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in specs: "bfloat16", "float16"."""
    return str(dtype).removeprefix("torch.")


def stored(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gates and outputs of layers whose weights have this one."""
    return torch.bfloat16 if dtype is torch.float8_e4m3fn else dtype


def family(index: int) -> str:
    """The family of kernels that device ``index`` runs, which has compute capability 8.0 at least."""
    return specs.SM90 if device.capability(index) == device.SM_90 else specs.PORTABLE


# Time of a wave of tiles of the gate GEMM by their tokens, as a multiple of that of 96 (NVIDIA H200, K = 1,024 to
# 4,096; the choices from it are within 1 % of the best at 27 shapes of 256 to 4,096 tokens).
WAVE = {48: 0.72, 64: 0.77, 96: 1.0, 128: 1.36, 144: 1.49}

# The same of e4m3 weights (NVIDIA H100 and H200, K = 2,048, 16,384 tokens; of 64 that of 16-bit weights).
_E4M3_WAVE = {64: 0.72, 96: 1.0, 144: 1.42}


@functools.lru_cache(4096)
def gate_pack(dtype: torch.dtype, m: int, n: int, clusters: int, fast: bool = True) -> specs.GatePackSpec:
    """The gate GEMM on sm_90a that runs ``clusters`` of two CTAs at a time; ``fast``: tensor cores hold whole sums."""

    def cost(tokens: int) -> float:
        # a cluster takes two tiles of tokens
        tiles = -(-m // (2 * tokens)) * geometry.tiles(n)
        return -(-tiles // clusters) * waves[tokens]

    name = dtype_name(dtype)
    waves = {t: _E4M3_WAVE[t] for t in specs.E4M3_GATE_TOKENS[fast]} if name == specs.E4M3 else WAVE
    # all give the same bits
    return specs.GatePackSpec(name, min(waves, key=cost), fast=fast)


@functools.cache
def quantize_gate(dtype: torch.dtype, k: int) -> specs.QuantizeGateSpec:
    """Rows of ``k`` values in int8 for the screen of the gate; NotImplementedError beyond the largest class."""
    return specs.QuantizeGateSpec(dtype_name(dtype), specs.k_class(k, specs.QUANTIZE_K_CLASSES))


@functools.lru_cache(4096)
def decode(dtype: torch.dtype, m: int, k: int, kind: str, family: str = specs.SM90) -> specs.DecodeSpec | None:
    """The kernel that computes "plain" or "gated" layers, or "experts", in one pass; None where there is none."""
    name = dtype_name(dtype)
    shapes = specs.decode_shapes(name, kind)
    shape = next((each for each in shapes if k <= each[0] * each[1] and 0 < m <= each[2]), None)
    if family != specs.SM90 or name not in specs.WEIGHTS or shape is None:
        return None
    return specs.DecodeSpec(name, kind, *shape)


# Most tokens whose clusters have so many CTAs, and non-zeros of a token that is never heavy; with more tokens clusters
# have as few CTAs as hold the row. Few of up to 32 tokens come here, as most take one pass. NVIDIA H200, K = 2,048 and
# 4,096, one neuron in 200: clusters of two took 0.90 to 1.06 of this time at 96 to 256 tokens.
TOKEN_CLUSTERS = ((32, 4, 64), (128, 4, 128))
_LIGHT = 64


@functools.lru_cache(4096)
def up_down_token(
    dtype: torch.dtype, m: int, k: int, gated: bool, invariant: bool = False, family: str = specs.SM90
) -> specs.UpDownTokenSpec:
    """The up and down projections of ``m`` tokens, token by token; ``invariant``: by the same kernel for any m."""
    name, k_max = dtype_name(dtype), specs.k_class(k)
    if family == specs.PORTABLE:
        return specs.UpDownTokenSpec(name, k_max, 1, gated, family=family)
    of_clusters = specs.token_k_classes(family, name)
    wanted = 2 if invariant else next((c for most, c, _ in TOKEN_CLUSTERS if m <= most), 1)
    cluster = min(c for c, classes in of_clusters.items() if k <= classes[-1] and c >= wanted)
    return specs.UpDownTokenSpec(name, specs.k_class(k, of_clusters[cluster]), cluster, gated)


# Multiprocessors whose CTAs form whole clusters, of so many: those of a part of the GPU are 16 or 18.
_WHOLE_CLUSTERS = 16
# Most tokens whose pieces helpers can number.
_MOST_SHARED = (1 << 15) - 1
# Numbers of tokens whose non-zeros `up_down_token` adds up, to find heavy tokens. A cluster of fewer looks at its own
# alone, and more have a limit of their own: adding up takes 75 of 345 to 482 us for 16,384 tokens of e4m3 weights
# (NVIDIA H200, K = 2,048, N = 5,632; with one token that fires all 5,632 neurons 417 us without it, 489 with it).
TOKENS_COUNTED = range(9, 4097)
_LIGHT_OF_MANY = 256


def token_helpers(m: int, spec: specs.UpDownTokenSpec, multiprocessors: int) -> int:
    """Clusters of ``up_down_token`` that share the heavy ones of ``m`` tokens: as many as run at a time."""
    if m > _MOST_SHARED:
        return 0
    if spec.cluster > 1:
        multiprocessors = max(multiprocessors // _WHOLE_CLUSTERS * _WHOLE_CLUSTERS, 1)
    return max(1, spec.ctas_per_sm * multiprocessors // spec.cluster)


def light_nonzeros(m: int, family: str = specs.SM90) -> int:
    """Most non-zeros of one of ``m`` tokens that its cluster computes even if that is more than its share."""
    if m >= TOKENS_COUNTED.stop:
        return _LIGHT_OF_MANY
    if family == specs.PORTABLE:
        # of one CTA. NVIDIA H100, K = 2,048, N = 5,632, "topic29", us with 64 and with the limits of clusters: 24.0 and
        # 29.5 at 8 tokens, 25.0 and 32.1 at 16, 27.9 and 32.8 at 64; with 16 one token of 29 takes 23.0 instead of 20.3
        return _LIGHT
    return next((light for most, _, light in TOKEN_CLUSTERS if m <= most), _LIGHT)


def expert_tokens(pairs: int, experts: int, invariant: bool) -> int:
    """Most pairs of a token and one expert in a unit of the gate GEMM of experts; if ``invariant`` for any of both."""
    if invariant:
        # smaller units divide K
        return specs.EXPERT_TOKENS[1]
    return next((size for size in specs.EXPERT_TOKENS if 2 * pairs <= size * experts), specs.EXPERT_TOKENS[-1])


# CTAs per multiprocessor that put pairs of tokens and experts in order. This and the constants of experts, up to
# `experts_by_row`, are of an NVIDIA H100 and experts of K = 2,688, N = 1,856.
PAIR_CTAS = 4


def expert_down(dtype: torch.dtype, k: int, gated: bool) -> specs.ExpertDownSpec:
    """The second half of experts, token by token."""
    return specs.ExpertDownSpec(dtype_name(dtype), specs.k_class(k, specs.EXPERT_K_CLASSES), 4, gated)


def by_union_of_experts(dtype: torch.dtype, n: int, gated: bool, invariant: bool) -> bool:
    """Whether units of pairs share the rows of experts: then no layer takes much longer than dense products."""
    return not (gated or invariant) and n <= geometry.LONGEST_SUM[dtype_name(dtype)]


# Most pairs of tokens and experts, over the experts, that are not left to dense products: without and with a gate.
# Those of e4m3 weights copy the down weights: 695 us by "row" and 1,091 dense at 48 pairs, 1,078 and 1,155 at 96, 1,878
# and 1,427 at 192.
_PAIRS_OF_EXPERT, _PAIRS_OF_GATED, _PAIRS_OF_E4M3 = 40, 3, 96


def experts_by_row(t: int, top: int, count: int, gated: bool, float8: bool = False) -> bool:
    """Whether ``t`` tokens of ``count`` experts, ``top`` for each, take less time than by grouped products."""
    most = _PAIRS_OF_GATED if gated else _PAIRS_OF_E4M3 if float8 else _PAIRS_OF_EXPERT
    return t * top <= most * count


# A gate with fewer values goes to torch's operators, unless a graph is captured: the host is the bound, and one
# operator of this package costs it as much time as two of torch's. An estimate.
FUSED_ELEMENTS = 1 << 20
# Most tokens for which dense layers compute gate and up in one product, if the weights lie one behind the other. It
# saves 6 to 14 % of the layer at 8 to 512 tokens, and nothing beyond (NVIDIA H200, K = 1,024, 2,048 and 4,096).
MERGED_TOKENS = 512


def _chosen_by_callers(kind: Any) -> Callable[..., Any]:
    """The spec of a kernel by the dtype of its operands and the other fields of ``kind``, which its callers know."""
    return functools.cache(lambda dtype, *others, **named: kind(dtype_name(dtype), *others, **named))


pack = _chosen_by_callers(specs.PackSpec)


def top_k(n: int) -> specs.TopKSpec:
    """The kernel for tokens of ``n`` neurons."""
    return specs.TopKSpec(next(q for q in specs.TOP_K_QUADS if n <= 4096 * q))


unpack = _chosen_by_callers(specs.UnpackSpec)
quantize_tokens = _chosen_by_callers(specs.QuantizeTokensSpec)
reglu = _chosen_by_callers(specs.RegluSpec)
gate_screen = _chosen_by_callers(specs.GateScreenSpec)
sampled_gate = _chosen_by_callers(specs.SampledGateSpec)
compact = _chosen_by_callers(specs.CompactSpec)
sampled_up = _chosen_by_callers(specs.SampledUpSpec)
sampled_grad = _chosen_by_callers(specs.SampledGradSpec)
gathered = _chosen_by_callers(specs.GatheredSpec)
transpose = _chosen_by_callers(specs.TransposeSpec)
weight_grad = _chosen_by_callers(specs.WeightGradSpec)
overflow = _chosen_by_callers(specs.OverflowSpec)
window = _chosen_by_callers(specs.WindowSpec)
