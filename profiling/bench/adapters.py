"""``python -m profiling.bench adapters``: a layer with LoRA adapters of peft, and without.

Time transformers' LlamaMLP with ReLU, on a workload's weights and tokens, with LoRA adapters of peft on all three
projections, whose base weights are frozen, and without, where all weights train: forward passes and training steps,
dense and by twell. Dense is the faster of eager and compiled, twell chooses by "auto". Times are medians of CUDA graphs
("graph") and of eager calls in a row ("queued"), in turn.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import twell
from profiling.bench.workloads import parse
from profiling.harness import Bench, Case, Row, Variant, Way, agrees, reds
from twell import testing
from twell.commands.request import RequestError, at_least
from twell.commands.timing import Call
from twell.testing import FFN

# of adapters: none, in the dtype of the layer, or in peft's default
ADAPTERS = ("none", "bfloat16", "float32")
NAMES = ["gate_proj", "up_proj", "down_proj"]
WAYS = (Way("graph", "graph", "graph_gain", 1e3), Way("queued", "queued", "queued_gain", 1e3))
SHOWN = ("workload", "pass", "adapters", "how", "us", "gain", "difference")


def layer(problem: FFN, adapters: str, rank: int) -> nn.Module:
    """The dense layer in a model of its own, with adapters whose second halves are not zero."""
    torch.manual_seed(0)
    n, k = problem.w_gate.shape
    config = LlamaConfig(hidden_size=k, intermediate_size=n, hidden_act="relu", mlp_bias=False)
    mlp = LlamaMLP(config).to(problem.x.device, problem.x.dtype)
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
    if dy is None:
        return lambda _: (module(x),)
    x = x.detach().requires_grad_()
    needed = [x, *(p for p in module.parameters() if p.requires_grad)]

    @torch.enable_grad()
    def step(_: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(x), needed, dy)

    return step


def by(problem: FFN, adapters: str, rank: int, dy: Tensor | None, way: str) -> Callable[[Any], Call]:
    """Calls of the layer in one of three ways; "twell" keeps its strategy, which is a site of its own."""
    model = layer(problem, adapters, rank)
    module: Any = (twell.sparsify_(model) if way == "twell" else model).get_submodule("mlp")
    module.train(dy is not None)
    call = call_of(torch.compile(module) if way == "dense compiled" else module, problem.x, dy)

    def of(strategy: Any) -> Call:
        # what it chooses is for it to run
        if isinstance(strategy, twell.AutoStrategy):
            module.strategy = strategy
        return call

    return of


OPTIONS = {
    "--workload": (str, ["topic29", "uniform29"], "without biases"),
    "--m": (at_least(1), 16384, "tokens"),
    "--k": (at_least(8), testing.PAPER_HIDDEN, "hidden size"),
    "--n": (at_least(8), testing.PAPER_NEURONS, "neurons"),
    "--rank": (at_least(1), 16, "of adapters"),
    "--compile": (("default", "none"), "default", "dense compiled, too"),
}
SECONDS = 0.5


def cases(bench: Bench) -> Iterator[Case]:
    given = bench.arguments
    names = ["dense eager", *(["dense compiled"] if given.compile != "none" else []), "twell"]

    def measure(base: Row, problem: FFN) -> Iterator[list[Row]]:
        training, adapters = base["pass"] == "training", base["adapters"]
        dy = testing.real_upstream(problem) if training else None
        made = {name: by(problem, adapters, given.rank, dy, name) for name in names}
        check = agrees(made["dense eager"](""), training)
        variants = [Variant(name, of, 1, "auto" if name == "twell" else "", check) for name, of in made.items()]
        rows = bench.timed(base, variants, WAYS)
        ours, stock = (made[name]("")(0)[0].float() for name in ("twell", "dense eager"))
        base |= {"difference": float((ours - stock).norm()), "red": reds(rows)}
        for how in ("graph", "queued"):
            us = {row["variant"].removeprefix("dense "): row.get(how) for row in rows}
            yield [{**base, "how": how, "us": us, "gain": rows[-1].get(f"{how}_gain")}]

    for source in parse(given.workload):
        problem = source.load(given.m, given.k, given.n, device=bench.device.torch_device, dtype=torch.bfloat16)
        if problem.b_gate is not None:
            raise RequestError(f"--workload: expected layers without biases, got {source.name} with one")
        for what, adapters in itertools.product(("forward", "training"), ADAPTERS):
            base = {"workload": source.name, "pass": what, "adapters": adapters, "rank": given.rank, "m": given.m}
            yield base, functools.partial(measure, base, problem)
