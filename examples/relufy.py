"""Make a dense model sparse: train any causal model of transformers further with FATReLU or another ReLU.

    python examples/relufy.py ~/models/Llama-3.2-1B --text ~/books --out runs/relu --target-nnz 100 --steps 2000
    python examples/relufy.py MODEL --dataset ~/fineweb --out runs/relu2 --activation relu2 --distill 0.5

MODEL is a folder or a Hub id of a model with SiLU, GELU or another activation, whose tokenizer reads the text. L1 of
the gate rises in stages, and FATReLU's threshold with it, until --target-nnz neurons fire per token. Other activations
have L1 alone. A model that has FATReLU already goes on from its threshold. The model is compared with the original, and
with the original trained on as many more tokens: the same text in the same order, the same schedule. The same command
resumes a run that stopped, unless the files of MODEL have changed. OUT/final is the model, OUT/report.json the
comparison.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor
from training import RequestError, checkpoint, options, parallel, relufied, report
from training.data import Sequences, Source, Tokens, prepare
from training.optimizer import adamw, learning_rate, require_finite
from training.stop import Stop
from training.whole import manifest
from transformers import AttentionInterface, AutoConfig, AutoTokenizer

from twell import _files, recipe
from twell.testing import machine_line

# Options that a resumed run must share with the saved one.
IDENTITY = (
    *("activation", "target_nnz", "distill", "sequence", "dtype", "seed", "steps"),
    *("tokens_per_step", "lr", "warmup", "weight_decay", "clip", "eval_sequences"),
)
ACTIVATIONS = ("fatrelu", "relu", "relu2", "drelu")
# tokens of a sequence, if the model has as many positions
SEQUENCE = 1024
# text that is read more often is warned of
MOST_READS = 4


def losses(logits: Tensor, targets: Tensor, theirs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Means per token in fp32: the cross-entropy, and the KL divergence from ``theirs``, logits of the original."""
    ours = F.log_softmax(logits.flatten(0, -2).float(), -1)
    cross_entropy = F.nll_loss(ours, targets.flatten())
    if theirs is None:
        return cross_entropy, torch.zeros_like(cross_entropy)
    wanted = F.log_softmax(theirs.flatten(0, -2).float(), -1)
    return cross_entropy, (wanted.exp() * (wanted - ours)).sum(-1).mean()


class Further:
    """A saved model that is trained further: with another activation and L1, or as it is if ``activation`` is None.

    Both kinds read the same text in the same order, from sequence ``first_row`` on, and their learning rate rises to
    --lr and falls to 0 alike.
    """

    def __init__(
        self,
        choice: argparse.Namespace,
        tokens: Tokens,
        here: parallel.World,
        activation: str | None,
        first_row: int = 0,
    ) -> None:
        self.choice, self.here, self.activation, self.first_row = choice, here, activation, first_row
        self.text = Sequences("training", tokens.train, choice.sequence, choice.seed)
        self.held = Sequences("held-out", tokens.held, choice.sequence)
        self.dtype = getattr(torch, choice.dtype)
        self.done, self.identity = 0, identity(choice, tokens, activation)
        self.accumulation = accumulation(choice)

        torch.manual_seed(choice.seed)
        self.model = self._load()
        self.original: Any = None
        self.target: recipe.TargetSparsity | recipe.TargetThreshold | None = None
        self.tracker: recipe.SparsityTracker | None = None
        if activation is not None:
            try:
                relufied.replace(self.model, activation, choice.strategy)
            except (TypeError, ValueError) as error:
                raise RequestError(f"MODEL: {error}") from error
            neurons = statistics.fmean(layer.intermediate for layer in recipe.layers(self.model).values())
            if choice.target_nnz >= neurons:
                raise RequestError(
                    f"--target-nnz: expected less than the {neurons:g} neurons of a layer, got {choice.target_nnz:g}"
                )
            recipe.record_aux(self.model, inputs=True)
            self.tracker = recipe.SparsityTracker(self.model, every=0)
            if activation == "fatrelu":
                self.target = recipe.TargetThreshold(self.model, choice.target_nnz, choice.steps)
            else:
                self.target = recipe.TargetSparsity(choice.target_nnz, choice.steps, of="gate")
            if choice.distill:
                self.original = self._load().eval().requires_grad_(False)
        self.model.train()
        self.losses: Callable[..., tuple[Tensor, Tensor]] = losses
        if choice.compile if choice.compile is not None else here.device.type == "cuda" and self._is_dense():
            relufied.compile_blocks(self.model)
            if self.original is not None:
                relufied.compile_blocks(self.original)
            self.losses = torch.compile(losses)
        self.parameters = list(self.model.parameters())
        self.optimizer = adamw(self.parameters, choice.lr, choice.weight_decay)
        # cross-entropy, KL divergence and the whole loss, summed over the steps since the last reading, at ``since``
        self.sums, self.since = torch.zeros(3, device=here.device), 0
        self.curve: list[dict[str, float]] = []
        # seconds before the last resume: of the whole run, and of the steps since the last reading
        self.spent = self.lapsed = 0.0
        self.began, self.clock = time.perf_counter(), report.Clock(here.device)

    def _load(self) -> Any:
        try:
            model = relufied.load(self.choice.model, dtype=torch.float32)
        except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise RequestError(f"MODEL: expected a causal model of transformers, got {first_line(error)}") from error
        if self.choice.attention is not None:
            for config in (model.config, model.config.get_text_config()):
                config._attn_implementation = self.choice.attention
        return model.to(self.here.device)

    def _is_dense(self) -> bool:
        """Whether all of the model can be compiled: a sparse layer goes on choosing its strategy."""
        return self.activation is None or self.choice.strategy == "dense"

    def step(self) -> None:
        """Take one optimizer step, without waiting for the device."""
        choice = self.choice
        size = choice.micro_batch
        for i in range(self.accumulation):
            row = self.first_row + (self.done * self.accumulation + i) * size
            inputs, targets = self.text.batch(row, size, self.here.device)
            if self.tracker is None:
                cross_entropy, divergence = self.forward(inputs, targets)
            else:
                with self.tracker.watch(self.done):
                    cross_entropy, divergence = self.forward(inputs, targets)
            loss = cross_entropy
            if self.original is not None:
                loss = (1 - choice.distill) * cross_entropy + choice.distill * divergence
            if self.target is not None:
                loss = loss + self.target.term(self.model)
            torch.autograd.backward(loss / self.accumulation)
            self.sums += torch.stack((cross_entropy, divergence, loss)).detach() / self.accumulation
        self.norm = parallel.clip(self.parameters, choice.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.done, choice.steps, choice.warmup, choice.lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.target is not None:
            self.target.update()
        self.done += 1

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy and KL divergence; the latter is 0 without distillation and in evaluation."""
        with torch.autocast(self.here.device.type, self.dtype, enabled=self.dtype != torch.float32):
            theirs = None
            if self.original is not None and torch.is_grad_enabled():
                with torch.no_grad():
                    theirs = self.original(input_ids=inputs, use_cache=False).logits
            logits = self.model(input_ids=inputs, use_cache=False).logits
            return self.losses(logits, targets, theirs)

    def rows(self) -> range:
        """The rows of the held-out text at which micro-batches begin."""
        size = self.choice.micro_batch
        count = min(self.choice.eval_sequences, len(self.held)) // size
        if count < 2:
            raise RequestError(
                f"held-out text: expected two --micro-batch {size} of sequences or more within --eval-sequences, got "
                f"{min(self.choice.eval_sequences, len(self.held))} sequences of {self.choice.sequence} tokens; "
                "more text, a larger --held-out, a smaller --micro-batch or a shorter --sequence helps"
            )
        return range(0, count * size, size)

    @torch.no_grad()
    def evaluate(self) -> tuple[list[float], recipe.SparsityStats | None]:
        """The cross-entropy of each held-out micro-batch, and the layers' figures on them."""
        rows = self.rows()
        self.model.eval()
        found: list[Tensor] = []
        tracker = self.tracker
        if tracker is not None:
            # the tracker counts in training mode alone, which changes nothing else in these layers
            for layer in recipe.layers(self.model).values():
                layer.train()
            tracker.read()
            tracker.every = 1
        try:
            for row in rows:
                inputs, targets = self.held.batch(row, self.choice.micro_batch, self.here.device)
                if tracker is None:
                    found.append(self.forward(inputs, targets)[0])
                else:
                    with tracker.watch(self.choice.steps + 1):
                        found.append(self.forward(inputs, targets)[0])
                    recipe.clear_aux(self.model)
            blocks = [float(value) for value in torch.stack(found).tolist()]
            return blocks, None if tracker is None else tracker.read()
        finally:
            if tracker is not None:
                tracker.every = 0
            self.model.train()

    def means(self) -> dict[str, float]:
        """Figures of the steps since the last reading; waits for the device. LostLoss if one is not finite."""
        names, steps = ("ce", "kl", "loss"), self.done - self.since
        values = dict(zip(names, (self.sums / steps).tolist()))
        self.sums.zero_()
        self.since = self.done
        require_finite(self.done, "a lower --lr", loss=values["loss"], gradient=float(self.norm))
        if self.target is not None:
            values |= self.target.read()
        return values | {"tokens_per_s": steps * self.choice.tokens_per_step / self.clock.lap()}

    def seconds(self) -> float:
        """Of the run, those before interruptions included."""
        return self.spent + time.perf_counter() - self.began

    def save(self, folder: Path) -> None:
        state: dict[str, Any] = {} if self.target is None else {"target": self.target.state_dict()}
        state |= {"sums": self.sums, "since": self.since, "curve": self.curve}
        state |= {"lapsed": self.clock.so_far(), "spent": self.seconds()}
        about = {"identity": self.identity}
        checkpoint.save(folder, self.done, self.model, self.optimizer, state, about, self.here, keep=1)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint; RequestError if it is of another run."""
        about = manifest(path)
        assert about is not None
        require_same(path, about["identity"], self.identity)
        state = checkpoint.load(path, self.model, self.optimizer, self.here)
        if self.target is not None:
            self.target.load_state_dict(state["target"])
        self.sums.copy_(state["sums"])
        self.since, self.curve = state["since"], state["curve"]
        self.lapsed, self.spent = state["lapsed"], state["spent"]
        self.done = about["step"]


def identity(choice: argparse.Namespace, tokens: Tokens, activation: str | None) -> dict[str, Any]:
    """What a resumed run must share with the saved one; a dense run has no sparsity to choose."""
    own = {name: getattr(choice, name) for name in IDENTITY}
    if activation is None:
        own |= dict.fromkeys(("activation", "target_nnz", "distill"))
    return own | {"content of MODEL": relufied.content(choice.model), "text": tokens.fingerprint}


def require_same(path: Path, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    """RequestError unless the results at ``path`` are of the same options."""
    if differing := [name for name in mine if mine[name] != theirs.get(name)]:
        changes = ", ".join(f"{name} ({theirs.get(name)} there, {mine[name]} here)" for name in differing)
        raise RequestError(f"--out: {path} is of a run that differs in {changes}; repeat its options or choose another")


def accumulation(choice: argparse.Namespace) -> int:
    """Micro-batches per step."""
    least = choice.sequence * choice.micro_batch
    if choice.tokens_per_step % least:
        raise RequestError(
            f"--tokens-per-step: expected a multiple of {least:,} (--sequence {choice.sequence} x --micro-batch "
            f"{choice.micro_batch}), got {choice.tokens_per_step:,}"
        )
    return int(choice.tokens_per_step // least)


def run_steps(
    run: Further, say: Callable[[str], None], save: Callable[[], None], stopping: Callable[[], bool]
) -> list[dict[str, float]] | None:
    """Train to the last step; the logged figures, or None if ``stopping`` became true."""
    choice = run.choice
    run.clock = report.Clock(run.here.device, run.lapsed)
    while run.done < choice.steps:
        if stopping():
            return None
        run.step()
        last = run.done == choice.steps
        if last or run.done % choice.log_every == 0:
            point = run.means()
            run.curve.append({"step": run.done, **{name: short(value) for name, value in point.items()}})
            more = "" if run.original is None else "  kl {kl:7.4f}".format(**point)
            if run.target is not None:
                more += "  coefficient {coefficient:.2e}  non-zeros {non_zeros:7.1f}".format(**point)
            more += "  threshold {threshold:.3f}".format(**point) if "threshold" in point else ""
            say(f"step {run.done:6d}  ce {point['ce']:7.4f}{more}  {point['tokens_per_s']:9,.0f} tokens/s")
        if not last and choice.checkpoint_every and run.done % choice.checkpoint_every == 0:
            with run.clock.paused():
                save()
    return run.curve


def first_line(error: Exception) -> str:
    """The type of an error and the first line of its text, or all of it in one line if that announces a list."""
    text = str(error).strip()
    line = text.partition("\n")[0].rstrip()
    return f"{type(error).__name__}: {' '.join(text.split()) if line.endswith(':') else line}"


def short(number: float) -> float:
    """Rounded to six digits."""
    return float(f"{number:.6g}")


def layers_of(stats: recipe.SparsityStats | None) -> list[dict[str, Any]]:
    """The figures of each layer for a file."""
    if stats is None:
        return []
    return [
        {
            "neurons": row.neurons,
            "l0": short(row.l0 or 0),
            "l1": short(row.l1 or 0),
            "dead": row.dead,
            "union": None if row.union is None else short(row.union),
        }
        for row in stats.layers
    ]


def measure(run: Further) -> dict[str, Any]:
    """The figures of a model on the held-out text."""
    blocks, stats = run.evaluate()
    layers = layers_of(stats)
    found = {"ce": short(statistics.fmean(blocks)), "blocks": [short(block) for block in blocks], "layers": layers}
    return found | ({"l0": short(statistics.fmean(layer["l0"] for layer in layers))} if layers else {})


def part(
    choice: argparse.Namespace,
    tokens: Tokens,
    here: parallel.World,
    name: str,
    stopping: Callable[[], bool],
) -> dict[str, Any] | None:
    """Train and measure "sparse" or "dense" in a folder of its own; None if it was stopped."""
    folder: Path = choice.out / name
    path = folder / "result.json"
    activation = choice.activation if name == "sparse" else None
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        require_same(path, found["identity"], identity(choice, tokens, activation))
        return found
    run = Further(choice, tokens, here, activation)

    def save() -> None:
        run.save(folder / "checkpoints")

    def say(line: str) -> None:
        here.say(f"{name}: {line}")

    first = None
    if (last := checkpoint.choose(folder / "checkpoints", "auto")) is not None:
        run.resume(last)
        say(f"resumed from {last}")
    else:
        first = short(statistics.fmean(run.evaluate()[0]))
        say(f"held-out ce {first:.4f} before training")
        folder.mkdir(parents=True, exist_ok=True)
        _files.write_text(folder / "first.json", json.dumps(first))
    curve = run_steps(run, say, save, stopping)
    if curve is None:
        save()
        say(f"stopped at step {run.done}; the same command goes on from there")
        return None
    result = {
        "identity": run.identity,
        "first_ce": json.loads((folder / "first.json").read_text()) if first is None else first,
        **measure(run),
        "threshold": run.target.settle() if isinstance(run.target, recipe.TargetThreshold) else None,
        "curve": curve,
        "parameters": sum(p.numel() for p in run.parameters),
        "seconds": short(run.seconds()),
        "machine": machine_line(here.device),
    }
    if name == "sparse":
        export(run.model, choice)
    _files.write_text(path, json.dumps(result, indent=1) + "\n")
    if (folder / "checkpoints").exists():
        shutil.rmtree(folder / "checkpoints")
    return result


def export(model: Any, choice: argparse.Namespace) -> None:
    """Write the model and its tokenizer to OUT/final, whole or not at all."""
    final: Path = choice.out / "final"
    for left in _files.leftovers(final):
        shutil.rmtree(left)
    with _files.replacing(final) as partial:
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(choice.model).save_pretrained(partial)


def error_of(a: Sequence[float], b: Sequence[float]) -> float:
    """The standard error of the mean difference of two models on the same micro-batches."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan


def compare(sparse: dict[str, Any], dense: dict[str, Any] | None, original: float) -> list[str]:
    """What the run has shown, in lines."""
    ce, layers = sparse["ce"], sparse["layers"]
    unions = [layer["union"] for layer in layers if layer["union"] is not None]
    dead = [layer["dead"] or 0 for layer in layers]
    lines = [
        f"non-zeros per token: {sparse['l0']:.1f} of {layers[0]['neurons']:,}, by layer "
        + ", ".join(f"{layer['l0']:.0f}" for layer in layers),
        f"dead neurons: {sum(dead):,} of {sum(layer['neurons'] for layer in layers):,}, by layer "
        + ", ".join(map(str, dead)),
        f"held-out cross-entropy: {ce:.4f}; the original has {original:.4f} ({100 * (ce / original - 1):+.2f} %)",
    ]
    if unions:
        each = ", ".join(f"{100 * union:.0f}" for union in unions)
        lines.append(f"neurons that 128 tokens fire: {100 * statistics.fmean(unions):.0f} %, by layer {each}")
    if sparse["threshold"] is not None:
        lines.append(f"FATReLU's threshold: {sparse['threshold']:g}")
    if dense is not None:
        error = error_of(sparse["blocks"], dense["blocks"])
        lines.append(
            f"the dense model after as many more tokens: {dense['ce']:.4f} ({100 * (ce / dense['ce'] - 1):+.2f} %, "
            f"standard error of the held-out text {100 * error / dense['ce']:.2f} %)"
        )
    return lines


def check(choice: argparse.Namespace) -> Any:
    """The model's tokenizer; sets --sequence if it was not given. RequestError before anything is written."""
    Source.of(choice).files()
    if not Path(choice.model).is_dir() and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", choice.model):
        raise RequestError(f"MODEL: expected a folder or a Hub id, got {choice.model!r} (no such folder)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(choice.model)
        config = AutoConfig.from_pretrained(choice.model).get_text_config()
    except (OSError, ValueError) as error:
        raise RequestError(f"MODEL: expected a model with a tokenizer, got {first_line(error)}") from error
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise RequestError("MODEL: expected a fast tokenizer with an end-of-sequence token")
    # a model without them, with ALiBi for example, has no limit
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    if choice.sequence is None:
        choice.sequence = min(SEQUENCE, positions)
    if choice.sequence > positions:
        raise RequestError(f"--sequence: expected at most the {positions} positions of MODEL, got {choice.sequence}")
    return tokenizer


def relufy(choice: argparse.Namespace, tokenizer: Any, here: parallel.World) -> int:
    """Train, compare and export; return the exit status."""
    tokens = prepare(
        Source.of(choice), choice.cache, len(tokenizer), choice.held_out, say=here.say, tokenizer=tokenizer
    )
    read = choice.steps * choice.tokens_per_step / tokens.train_tokens
    here.say(f"{tokens.train_tokens:,} tokens of text, each read {read:.2f} times; {machine_line(here.device)}")
    if read > MOST_READS:
        here.say(
            f"warning: text that is read more than {MOST_READS} times may be learnt by heart; more of it or fewer "
            "--steps help"
        )
    found: dict[str, Any] = {}
    with Stop(here.say) as stop:
        for name in ("sparse", "dense")[: 2 if choice.dense else 1]:
            result = part(choice, tokens, here, name, lambda: stop.signal is not None)
            if result is None:
                return 128 + (stop.signal or 15)
            found[name] = result
            # the next model needs the memory
            gc.collect()
    sparse, dense = found["sparse"], found.get("dense")
    if dense is None:
        original = statistics.fmean(_original(choice, tokens, here))
    else:
        original = dense["first_ce"]
    lines = compare(sparse, dense, original)
    warning = report.missed_target(choice.target_nnz, sparse["l0"], choice.steps)
    lines += [warning] if warning else []
    content = {"machine": sparse["machine"], "original_ce": original, "target_missed": bool(warning), **found}
    content["said"] = lines
    _files.write_text(choice.out / "report.json", json.dumps(content, indent=1) + "\n")
    print("", *lines, f"wrote {choice.out / 'final'} and {choice.out / 'report.json'}", sep="\n")
    return 0


def _original(choice: argparse.Namespace, tokens: Tokens, here: parallel.World) -> list[float]:
    run = Further(choice, tokens, here, None)
    return run.evaluate()[0]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        "relufy.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder from save_pretrained with its tokenizer, or a Hub id")
    add("--out", type=Path, required=True, metavar="FOLDER", help="checkpoints, results and the model")

    add = parser.add_argument_group("sparsity").add_argument
    add(
        "--activation", choices=ACTIVATIONS, default="fatrelu", help="the new one; drelu needs a gate (default fatrelu)"
    )
    add("--target-nnz", type=options.rate, default=30.0, metavar="N", help="non-zeros per token (default 30)")
    add(
        "--distill",
        type=options.rate,
        default=0.0,
        metavar="SHARE",
        help="share of the loss that is the KL divergence from the original's logits (default 0)",
    )
    add("--dense", action=argparse.BooleanOptionalAction, default=True, help="also train the original, to compare")
    strategies = ["dense", "auto", "row", "union"]
    add("--strategy", choices=strategies, default="dense", help="of the FFNs in training")

    add = parser.add_argument_group("data").add_argument
    add("--text", type=Path, nargs="+", default=[], metavar="PATH", help="text files, or folders of them")
    add("--suffix", nargs="+", default=[], metavar=".EXT", help="only files of --text with these endings")
    add("--dataset", type=Path, metavar="PATH", help="a folder of save_to_disk, or Parquet or JSON Lines files")
    add("--column", default="text", metavar="NAME", help="column of the dataset (default text)")
    add("--max-bytes", type=options.size, default="1G", metavar="SIZE", help="text to read (default 1G)")
    add("--held-out", type=float, default=0.02, metavar="SHARE", help="held-out share of the text (default 0.02)")
    add(
        "--sequence",
        type=options.positive,
        metavar="TOKENS",
        help=f"length of a sequence (default {SEQUENCE}, or the positions of MODEL if they are fewer)",
    )
    add("--cache", type=Path, metavar="FOLDER", help="cache of tokens; runs may share it (default OUT/cache)")

    add = parser.add_argument_group("optimisation").add_argument
    add("--steps", type=options.positive, default=1000, metavar="N", help="default 1000")
    add("--tokens-per-step", type=options.positive, default=1 << 17, metavar="N", help="default 131072")
    add("--micro-batch", type=options.positive, default=8, metavar="N", help="sequences at a time (default 8)")
    add("--lr", type=options.rate, default=3e-4, metavar="RATE", help="peak learning rate of AdamW (default 3e-4)")
    add("--warmup", type=options.natural, metavar="STEPS", help="of the rate (default: a twentieth of --steps)")
    add("--weight-decay", type=options.rate, default=0.1, metavar="RATE", help="for matrices only (default 0.1)")
    add("--clip", type=options.rate, default=1.0, metavar="NORM", help="largest gradient norm (default 1; 0: any)")
    add("--seed", type=options.natural, default=0, metavar="N", help="order of text (default 0)")

    add = parser.add_argument_group("machine").add_argument
    add("--device", choices=["cuda", "cpu"], help="default: cuda if available")
    add(
        "--dtype",
        choices=options.DTYPES,
        default="bfloat16",
        help="of products; weights stay float32 (default bfloat16)",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile each block (default: on cuda where FFNs run dense)",
    )
    add(
        "--attention",
        metavar="NAME",
        help='of transformers (default: the model\'s); "causal" waits for no device, for models whose attention is '
        "causal and nothing else",
    )
    add("--log-every", type=options.positive, default=20, metavar="STEPS", help="default 20")
    add("--checkpoint-every", type=options.natural, default=500, metavar="STEPS", help="default 500; 0: never")
    add("--eval-sequences", type=options.positive, default=512, metavar="N", help="held-out sequences (default 512)")

    choice = parser.parse_args(arguments)
    if bool(choice.text) == (choice.dataset is not None):
        parser.error("expected either --text or --dataset")
    if not 0 < choice.held_out < 1:
        parser.error(f"--held-out: expected a share between 0 and 1, got {choice.held_out}")
    if choice.distill > 1:
        parser.error(f"--distill: expected a share of at most 1, got {choice.distill:g}")
    if not choice.target_nnz:
        parser.error("--target-nnz: expected a number above 0, got 0")
    if choice.strategy != "dense" and choice.activation == "fatrelu":
        parser.error(f"--strategy: expected dense with fatrelu, whose threshold changes, got {choice.strategy}")
    known = {"eager", *AttentionInterface().valid_keys()}
    if choice.attention is not None and choice.attention not in known:
        parser.error(f"--attention: expected one of {', '.join(sorted(known))}, got {choice.attention}")
    if choice.warmup is None:
        choice.warmup = choice.steps // 20
    if choice.cache is None:
        choice.cache = choice.out / "cache"
    return choice


def main(arguments: list[str] | None = None) -> int:
    choice = parse(arguments)
    try:
        with parallel.world(None, choice.device) as here:
            tokenizer = check(choice)
            with checkpoint.alone(choice.out, here):
                return relufy(choice, tokenizer, here)
    except (RequestError, ImportError) as error:
        print(f"relufy.py: error: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"relufy.py: error: out of memory: a smaller --micro-batch takes less. {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
