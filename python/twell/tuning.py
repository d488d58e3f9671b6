"""From a problem to the spec of the kernel that runs it, and to the strategy."""

from __future__ import annotations

import functools

import torch

from twell._runtime import specs


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in specs: "bfloat16", "float16"."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def gate_pack(dtype: torch.dtype, compression: int, bias: bool) -> specs.GatePackSpec:
    """The gate GEMM for operands of ``dtype``; ``compression`` is 2, 4 or 8."""
    return specs.GatePackSpec(dtype_name(dtype), compression, bias)


@functools.cache
def up_down(dtype: torch.dtype, k: int, bias: bool) -> specs.UpDownSpec:
    """The gated up and down projections for hidden size ``k``; NotImplementedError beyond the largest class."""
    return specs.UpDownSpec(dtype_name(dtype), specs.k_class(k), bias)


@functools.cache
def down(dtype: torch.dtype, k: int, bias: bool) -> specs.DownSpec:
    """The down projection for hidden size ``k``; NotImplementedError beyond the largest class."""
    return specs.DownSpec(dtype_name(dtype), specs.k_class(k), bias)


@functools.cache
def unpack(dtype: torch.dtype) -> specs.UnpackSpec:
    """TwELL to dense."""
    return specs.UnpackSpec(dtype_name(dtype))


@functools.cache
def compact(dtype: torch.dtype) -> specs.CompactSpec:
    """TwELL to the hybrid format."""
    return specs.CompactSpec(dtype_name(dtype))


@functools.cache
def sampled_up(dtype: torch.dtype, bias: bool) -> specs.SampledUpSpec:
    """The up projection at the non-zeros."""
    return specs.SampledUpSpec(dtype_name(dtype), bias)


@functools.cache
def sampled_grad(dtype: torch.dtype, gated: bool) -> specs.SampledGradSpec:
    """Gradients of the gate and the up projection at the non-zeros."""
    return specs.SampledGradSpec(dtype_name(dtype), gated)


@functools.cache
def gathered(dtype: torch.dtype, products: int, bias: bool) -> specs.GatheredSpec:
    """The sum of ``products`` sparse matrices times weights. 0: of the gate values that the entries hold."""
    return specs.GatheredSpec(dtype_name(dtype), products, bias)


@functools.cache
def rank() -> specs.RankSpec:
    """Neurons by popularity."""
    return specs.RankSpec()


@functools.cache
def transpose(dtype: torch.dtype, gated: bool) -> specs.TransposeSpec:
    """The non-zeros by neuron."""
    return specs.TransposeSpec(dtype_name(dtype), gated)


@functools.cache
def weight_grad(dtype: torch.dtype, gated: bool, bias: bool, accumulate: bool) -> specs.WeightGradSpec:
    """Gradients of all weights and biases, stored, or added to fp32."""
    return specs.WeightGradSpec(dtype_name(dtype), gated, bias, accumulate)


@functools.cache
def overflow(dtype: torch.dtype, mode: str, gated: bool, bias: bool) -> specs.OverflowSpec:
    """``mode`` (forward, input, weight, weight_add) of a training step whose non-zeros exceed the hybrid format."""
    return specs.OverflowSpec(dtype_name(dtype), mode, gated, bias)


def strategy(requested: str) -> str:
    """The strategy to run: "row" or "dense". "auto" is "row" whatever the sparsity.

    Raises ValueError for a name that is none, NotImplementedError for "union", which has no kernel.
    """
    if requested == "union":
        raise NotImplementedError('strategy="union" has no kernel yet, expected "auto", "row" or "dense"')
    if requested not in ("auto", "row", "dense"):
        raise ValueError(f'strategy must be "auto", "row", "union" or "dense", got {requested!r}')
    return "dense" if requested == "dense" else "row"
