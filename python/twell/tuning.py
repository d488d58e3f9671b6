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


def strategy(requested: str) -> str:
    """The strategy to run: "row" or "dense". "auto" is "row" whatever the sparsity.

    Raises ValueError for a name that is none, NotImplementedError for "union", which has no kernel.
    """
    if requested == "union":
        raise NotImplementedError('strategy="union" has no kernel yet, expected "auto", "row" or "dense"')
    if requested not in ("auto", "row", "dense"):
        raise ValueError(f'strategy must be "auto", "row", "union" or "dense", got {requested!r}')
    return "dense" if requested == "dense" else "row"
