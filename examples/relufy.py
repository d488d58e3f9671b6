"""Make a dense model sparse: train a causal model of transformers further with FATReLU or another ReLU.

    python examples/relufy.py --model ~/models/Llama-3.2-1B --text ~/books --output_dir runs/relu --nnz 100
    python examples/relufy.py --model MODEL --text ~/books --output_dir runs/relu2 --activation relu2 --distill 0.5

MODEL is a folder or a Hub id of a model with SiLU, GELU or another activation, whose tokenizer reads the text. L1 rises
in stages, and FATReLU's threshold with it, until --nnz neurons fire per token; other activations have L1 alone. A model
that has FATReLU already goes on from its threshold. The original is then trained as long, on the same text in the same
order, to compare. The same command resumes a run that stopped. OUT/sparse/final is the model, OUT/sparse/chart.png its
chart, OUT/report.json the comparison.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from runs import Text, fit, parse, require, sequences
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from twell import recipe
from twell.base import files
from twell.commands.request import RequestError, exit_status
from twell.integrations import layouts
from twell.integrations import transformers as twell_hf
from twell.nn.layers import SparseFFN

FAMILY = ["fatrelu", "relu", "relu2", "drelu"]


@dataclass
class Options(Text):
    model: str = field(kw_only=True, metadata={"help": "a folder of save_pretrained with its tokenizer, or a Hub id"})
    activation: str = field(default="fatrelu", metadata={"help": "the new one; drelu needs a gate", "choices": FAMILY})
    nnz: float = field(default=30, metadata={"help": "non-zeros per token at the end"})
    distill: float = field(default=0.0, metadata={"help": "share of the KL divergence from the original in the loss"})
    dense: bool = field(default=True, metadata={"help": "also train the original, to compare"})
    strategy: str = field(
        default="dense", metadata={"help": "of FFNs in training", "choices": ["dense", "auto", "row", "union"]}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require("--nnz", self.nnz > 0, "a number above 0", self.nnz)
        require("--distill", 0 <= self.distill <= 1, "a share from 0 to 1", self.distill)
        moving = self.activation == "fatrelu" and self.strategy != "dense"
        require("--strategy", not moving, "dense with fatrelu, whose threshold changes", self.strategy)


def load(model: str | Path, **how: Any) -> Any:
    """A causal model of transformers; its FFNs are twell's where its configuration names one of ``FAMILY``."""
    named = layouts.activation(AutoConfig.from_pretrained(model).get_text_config().to_dict())
    read = twell_hf.load if named in FAMILY else AutoModelForCausalLM.from_pretrained
    return read(model, **how)


def replace(model: Any, activation: str, strategy: Any) -> None:
    """Give the FFNs of ``model`` another activation, in place. FATReLU begins as ReLU, or with the threshold it has."""
    begin: Any = "relu" if activation == "fatrelu" else activation
    if not any(isinstance(layer, SparseFFN) for layer in model.modules()):
        twell_hf.sparsify(model, activation=begin, strategy=strategy)
        return
    for layer in recipe.layers(model).values():
        layer.strategy = strategy
        if layer.activation != activation:
            layer.threshold = 0
            layer.activation = begin


def distilling(original: Any, share: float) -> Callable[..., None]:
    """A forward hook: a ``share`` of the loss in training becomes the KL divergence from ``original``."""

    def hook(model: Any, args: Any, given: dict[str, Any], output: Any) -> None:
        if not model.training:
            return
        ids, tokens = given["input_ids"], given.get("num_items_in_batch")
        with torch.no_grad():
            theirs = original.to(ids.device)(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        ours = output.logits.float().log_softmax(-1)
        divergence = F.kl_div(ours, theirs, reduction="sum", log_target=True)
        # as the model divides its own loss
        divergence = divergence / (ids.numel() if tokens is None else tokens)
        output["loss"] = (1 - share) * output.loss + share * divergence

    return hook


def prepared(options: Options, training: Any, name: str) -> tuple[Any, list[Any]]:
    """The model to train as "sparse" or "dense", and its callbacks."""
    set_seed(training.seed)
    model = load(options.model, dtype=torch.float32)
    if name == "dense":
        return model, []
    replace(model, options.activation, options.strategy)
    neurons = statistics.fmean(layer.intermediate for layer in recipe.layers(model).values())
    require("--nnz", options.nnz < neurons, f"less than the {neurons:g} neurons of a layer", f"{options.nnz:g}")
    if options.distill:
        dtype = torch.bfloat16 if training.bf16 else torch.float32
        original = load(options.model, dtype=dtype).eval().requires_grad_(False)
        # before the callback's hook, which adds the L1 term to this loss
        model.register_forward_hook(distilling(original, options.distill), with_kwargs=True)
    moving = options.activation == "fatrelu"
    return model, [twell_hf.SparsityCallback(nnz=options.nnz, moving_threshold=moving)]


def compare(options: Options, out: Path, found: dict[str, dict[str, float]]) -> list[str]:
    """What the run has shown, in lines, which it also writes to OUT/report.json."""
    sparse, original = found["sparse"], None
    lines = [f"non-zeros per token in training: {sparse['sparsity_l0']:.1f}, where --nnz is {options.nnz:g}"]
    lines += [f"dead neurons: {100 * sparse['sparsity_dead']:.1f} %", f"held-out loss: {sparse['eval_loss']:.4f}"]
    if "dense" in found:
        original = json.loads((out / "dense" / "log.jsonl").read_text().partition("\n")[0])["eval_loss"]
        for name, loss in (("the original's", original), ("after as long", found["dense"]["eval_loss"])):
            lines.append(f"  {name}: {loss:.4f} ({100 * (sparse['eval_loss'] / loss - 1):+.2f} %)")
    report = {"original_loss": original, **found, "said": lines}
    files.write_text(out / "report.json", json.dumps(report, indent=1) + "\n")
    return lines


def main(arguments: list[str] | None = None) -> int:
    return exit_status("relufy.py", lambda: run(arguments))


def run(arguments: list[str] | None) -> int:
    options, training = parse(
        "relufy.py", __doc__, Options, arguments, learning_rate=3e-4, gradient_accumulation_steps=16, eval_on_start=True
    )
    options.files()
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        config = AutoConfig.from_pretrained(options.model).get_text_config()
    except (OSError, ValueError) as error:
        raise RequestError(f"--model: expected a model with a tokenizer, got {' '.join(str(error).split())}") from error
    ends = tokenizer.is_fast and tokenizer.eos_token_id is not None
    require("--model", ends, "a fast tokenizer with an end-of-sequence token", type(tokenizer).__name__)
    most = getattr(config, "max_position_embeddings", None) or options.sequence
    require("--sequence", options.sequence <= most, f"at most the {most} positions of MODEL", options.sequence)
    data, out = sequences(options, training, tokenizer), Path(training.output_dir)
    found: dict[str, dict[str, float]] = {}
    for name in ("sparse", "dense")[: 1 + options.dense]:
        own = copy.copy(training)
        own.output_dir = str(out / name)
        model, callbacks = prepared(options, training, name)
        found[name] = fit(model, options, own, data, callbacks)
        # the next model needs the memory
        del model, callbacks
    if training.process_index == 0:
        print(*compare(options, out, found), f"wrote {out / 'sparse' / 'final'} and {out / 'report.json'}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
