"""A layer with LoRA adapters of peft, dense and by twell, and without adapters: forward passes and training steps.

    python -m profiling.adapters --json profiling/results/adapters.json

The layer is transformers' LlamaMLP with ReLU, on a workload's weights and tokens. Adapters are on all three
projections, and their base weights are frozen; without adapters all weights train. Dense is the faster of eager and
compiled, twell chooses by "auto". Times are medians of CUDA graphs ("graph") and of eager calls in a row ("queued"), in
turn.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import twell
from profiling.bench import protocol, workloads
from profiling.bench.cli import L2_TBS
from profiling.bench.variants import SETTLING
from twell import _files, testing
from twell.commands.timing import Call, measure, spread
from twell.testing import FFN

# of adapters: none, in the dtype of the layer, or in peft's default
ADAPTERS = ("none", "bfloat16", "float32")
NAMES = ["gate_proj", "up_proj", "down_proj"]


def layer(problem: FFN, adapters: str, rank: int) -> nn.Module:
    """The dense layer in a model of its own, with adapters whose second halves are not zero."""
    n, k = problem.w_gate.shape
    config = LlamaConfig(hidden_size=k, intermediate_size=n, hidden_act="relu", mlp_bias=False)
    mlp = LlamaMLP(config).to("cuda", problem.x.dtype)
    with torch.no_grad():
        for name, weight in zip(NAMES, (problem.w_gate, problem.w_up, problem.w_down.t())):
            mlp.get_submodule(name).weight.copy_(weight)
    model = nn.ModuleDict({"mlp": mlp})
    if adapters != "none":
        config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=NAMES)
        peft.inject_adapter_in_model(config, model)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(getattr(torch, adapters))
            if "lora_B" in name:
                nn.init.normal_(parameter, std=1e-4)
    return model


def call_of(module: Any, x: Tensor, dy: Tensor | None) -> Call:
    """A forward pass, or a training step for ``dy``."""
    if dy is None:
        return lambda _: (module(x),)
    x = x.detach().requires_grad_()
    needed = [x, *(p for p in module.parameters() if p.requires_grad)]
    return lambda _: torch.autograd.grad(module(x), needed, dy)


def rows_of(gpu: protocol.Gpu, source: workloads.Source, m: int, rank: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Rows of one workload."""
    problem = source.load(m, testing.PAPER_HIDDEN, testing.PAPER_NEURONS, device="cuda", dtype=torch.bfloat16)
    for training in (False, True):
        dy = testing.real_upstream(problem) if training else None
        for adapters in ADAPTERS:
            ways = {}
            for way in ("eager", "compiled", "twell"):
                model = layer(problem, adapters, rank)
                module: Any = (twell.sparsify_(model) if way == "twell" else model).get_submodule("mlp")
                module.train(training)
                ways[way] = call_of(torch.compile(module) if way == "compiled" else module, problem.x, dy)
            with torch.set_grad_enabled(training):
                for _ in range(SETTLING):
                    ways["twell"](0)
                    torch.cuda.synchronize()
                recordings: dict[str, Any] = {f"{way} graph": gpu.record(call, 1) for way, call in ways.items()}
                recordings |= {f"{way} queued": gpu.eager("queued", call, 1) for way, call in ways.items()}
                times = {key: spread(each).median * 1e3 for key, each in measure(recordings, seconds).items()}
                del recordings
                error = float((ways["twell"](0)[0].float() - ways["eager"](0)[0].float()).norm())
            for how in ("graph", "queued"):
                us = {way: times[f"{way} {how}"] for way in ways}
                gain = min(us["eager"], us["compiled"]) / us["twell"]
                of = {"workload": source.name, "pass": "training" if training else "forward", "adapters": adapters}
                yield of | {"rank": rank, "m": m, "how": how, "us": us, "gain": gain, "difference": error}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=["topic29", "uniform29"])
    parser.add_argument("--m", type=int, default=16384, help="tokens (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of adapters (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of replays of each layer (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    gpu, rows = protocol.Gpu(torch.device("cuda", 0)), []
    _, machine = gpu.ceilings(torch.bfloat16, L2_TBS)
    for source in workloads.parse(arguments.workload):
        for row in rows_of(gpu, source, arguments.m, arguments.rank, arguments.seconds):
            rows.append(row)
            us = "  ".join(f"{way} {value:.0f}" for way, value in row["us"].items())
            print(f"{row['workload']:10} {row['pass']:9} {row['adapters']:9} {row['how']:7} {us}  {row['gain']:.2f}")
    if arguments.json:
        _files.write_text(arguments.json, json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
