"""Models to serve: their weights as an engine holds them, and what reaches each feed-forward layer."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profiling.bench.models_random import Pattern, build, draw, draw_ids, paper_nnz, parse_sizes
from twell.commands import saved_model
from twell.commands.request import pick_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--config",
        type=parse_sizes,
        default="1.5B",
        metavar="SIZE",
        help="a drawn model: one of the paper's, or LAYERSxHIDDENxNEURONS[xHEADS[xVOCAB]] (1.5B)",
    )
    add("--nnz", type=float, help="mean non-zeros per token of a drawn model (default: the paper's)")
    add("--model", type=Path, metavar="FOLDER", help="a saved model in place of a drawn one; needs --text")
    add("--text", type=Path, nargs="+", metavar="PATH", help="text for --model")
    add("--device", help="cuda, cuda:1, cpu (default: cuda if there is one)")


@dataclass
class Subject:
    """A model in bfloat16 whose layers run dense.

    prompts: ids [sequences, tokens] of long prompts. heads: ids [sequences, tokens] of the beginnings of many other
    sequences, whose last tokens are a batch that decodes.
    """

    name: str
    model: Any
    prompts: Tensor
    heads: Tensor

    @property
    def device(self) -> torch.device:
        found: torch.device = next(iter(self.model.parameters())).device
        return found


def subject(arguments: argparse.Namespace, prompts: tuple[int, int], heads: tuple[int, int]) -> Subject:
    """The model of ``arguments``, with ids of these shapes."""
    device = pick_device(arguments.device)
    if arguments.model is None:
        shape = arguments.config
        pattern = Pattern(arguments.nnz or paper_nnz(shape))
        first, second = (draw_ids(shape, *size, pattern.topic, seed) for seed, size in enumerate((prompts, heads)))
        model = build(shape, prompts[1], device)
        draw(model, first, pattern)
        return Subject(f"{shape.name}, {pattern}", model, first, second)
    wanted = prompts[0] * prompts[1] + heads[0] * heads[1]
    options = argparse.Namespace(
        model=arguments.model,
        text=arguments.text or [],
        tokens=wanted,
        sequence=prompts[1],
        device=str(device),
        dtype="bfloat16",
        activation=None,
    )
    loaded = saved_model.load(options)
    sequences = saved_model.read(loaded, options, least=wanted).sequences
    ids = torch.tensor([token for sequence in sequences for token in sequence], device="cpu")
    first, second = ids[: prompts[0] * prompts[1]].view(prompts), ids[prompts[0] * prompts[1] :].view(heads)
    return Subject(arguments.model.resolve().name, loaded.model, first, second)


@dataclass
class Block:
    """A decoder layer as an engine holds it: gate and up, and query, key and value, in one weight each.

    w_gate, w_up: views of ``merged`` [2 N, K]. down [K, N] as nn.Linear has it, down_rows: the same by rows of neurons.
    """

    merged: Tensor
    w_gate: Tensor
    w_up: Tensor
    down: Tensor
    down_rows: Tensor
    qkv: Tensor
    b_qkv: Tensor | None
    out: Tensor
    norms: tuple[Tensor, Tensor]
    eps: float
    heads: tuple[int, int, int]


def blocks(model: Any) -> list[Block]:
    """The decoder layers of a gated model."""
    config = model.config
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    found = []
    for layer in model.get_decoder().layers:
        mlp, attention = layer.mlp, layer.self_attn
        merged = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
        w_gate, w_up = merged.chunk(2)
        down = mlp.down_proj.weight.detach()
        three = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [linear.bias for linear in three if linear.bias is not None]
        norms = layer.input_layernorm, layer.post_attention_layernorm
        found.append(
            Block(
                merged,
                w_gate,
                w_up,
                down.contiguous(),
                down.t().contiguous().t(),
                torch.cat([linear.weight for linear in three]).detach(),
                torch.cat(biases).detach() if biases else None,
                attention.o_proj.weight.detach(),
                (norms[0].weight.detach(), norms[1].weight.detach()),
                float(config.rms_norm_eps),
                (heads, config.num_key_value_heads, size),
            )
        )
    return found


def inputs(of: Subject) -> tuple[list[Tensor], list[Tensor]]:
    """For each layer what its FFN gets: all tokens of the prompts [tokens, K], and the last ones of the heads."""
    watched = saved_model.layers(of.model)
    prefill: list[list[Tensor]] = [[] for _ in watched]
    decode: list[list[Tensor]] = [[] for _ in watched]

    def run(ids: Tensor, batch: int, into: list[list[Tensor]], last: int) -> None:
        def keep(i: int, x: Tensor, first: Tensor) -> None:
            into[i].append(x.view(-1, ids.shape[1], x.shape[-1])[:, -last:].flatten(0, 1).clone())

        parts = [saved_model.Batch(part, torch.ones_like(part, dtype=torch.bool)) for part in torch.split(ids, batch)]
        saved_model.observe(of.model, watched, parts, keep)

    run(of.prompts, 2, prefill, of.prompts.shape[1])
    run(of.heads, 64, decode, 1)
    return [torch.cat(parts) for parts in prefill], [torch.cat(parts) for parts in decode]
