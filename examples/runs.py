"""What the scripts share: text as sequences of tokens, runs of transformers' Trainer that go on, and their chart."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# spinning threads would take cores from other work; torch reads this at import
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from twell.base import files as _files
from twell.commands.request import RequestError

END = "<|endoftext|>"
# a tokenizer is trained on the first bytes of the text; documents are tokenised in groups of so many bytes
TOKENIZER_TEXT, GROUP = 32 << 20, 8 << 20
# longer documents are cut, so that none is slow to tokenise or most of the held-out text
LONGEST = 256 << 10
# options of Trainer that a resumed run must share with the saved one
SAME = "max_steps learning_rate weight_decay warmup_steps per_device_train_batch_size gradient_accumulation_steps seed"
NON_ZEROS = "sparsity_l0"


@dataclass
class Text:
    """Options of the text. ``without``: a folder to leave out."""

    without = ""
    text: list[str] = field(metadata={"help": "text files, or folders of them; UTF-8"})
    suffix: str = field(default="", metadata={"help": "read only files whose names end so"})
    max_mb: float = field(default=1024, metadata={"help": "megabytes of text to read"})
    held_out: float = field(default=0.02, metadata={"help": "share of the text that is held out"})
    sequence: int = field(default=1024, metadata={"help": "tokens of a sequence"})
    eval_sequences: int = field(default=512, metadata={"help": "sequences of the held-out text, at most"})

    def __post_init__(self) -> None:
        require("--max_mb", self.max_mb > 0, "a number above 0", self.max_mb)
        require("--held_out", 0 < self.held_out < 1, "a share between 0 and 1", self.held_out)
        require("--sequence", self.sequence > 1, "2 or more", self.sequence)
        require("--eval_sequences", self.eval_sequences > 0, "1 or more", self.eval_sequences)

    def files(self) -> list[Path]:
        found: list[Path] = []
        for root in map(Path, self.text):
            require("--text", root.exists(), "files or folders", f"{str(root)!r}, which does not exist")
            found += _files.files_below(root, self.suffix) if root.is_dir() else [root]
        if self.without:
            found = [path for path in found if Path(self.without).resolve() not in path.resolve().parents]
        require("--text", bool(found), f"files{self.suffix and ' that end in '}{self.suffix}", "none")
        return found

    def documents(self, limit: float) -> Iterator[str]:
        """The first ``limit`` bytes, by documents of at most ``LONGEST`` characters, in the same order each time."""
        files = self.files()
        random.Random(0).shuffle(files)
        for path in files:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            for start in range(0, 0 if "\0" in text else len(text), LONGEST):
                document = text[start : start + LONGEST][: max(0, math.ceil(limit))]
                limit -= len(document.encode())
                if document.strip():
                    yield document


def require(option: str, right: bool, expected: str, got: object) -> None:
    if not right:
        raise RequestError(f"{option}: expected {expected}, got {got}")


def parse(script: str, about: str | None, options: Any, arguments: list[str] | None, **defaults: Any) -> Any:
    """The script's ``options`` and those of Trainer, whose ``defaults`` are the script's."""
    parser = HfArgumentParser((options, TrainingArguments), prog=script, description=about, allow_abbrev=False)
    gpu = torch.cuda.is_available()
    common = {"max_steps": 1000, "logging_steps": 10, "eval_steps": 200, "save_steps": 200, "eval_strategy": "steps"}
    common |= {"lr_scheduler_type": "cosine", "weight_decay": 0.1, "adam_beta2": 0.95, "bf16": gpu, "use_cpu": not gpu}
    common |= {"save_total_limit": 2, "report_to": "none", "logging_nan_inf_filter": False}
    # each step uses all parameters, which DDP need not find out
    common["ddp_find_unused_parameters"] = False
    parser.set_defaults(**(common | defaults))
    chosen, training = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    require("--max_steps", training.max_steps > 0, "1 or more", training.max_steps)
    # a twentieth of the steps; Trainer has none by default
    training.warmup_steps = training.warmup_steps or training.max_steps // 20
    chosen.without = training.output_dir
    return chosen, training


def new_tokenizer(text: Text, size: int) -> Any:
    """A tokenizer of bytes and pairs, trained on the beginning of the text."""
    require("--vocab", size > 256, "257 or more, the bytes and the end of a document", size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.documents(min(TOKENIZER_TEXT, text.max_mb * 1e6)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences of ``length`` tokens, one after another."""

    def __init__(self, part: str, tokens: Tensor, length: int) -> None:
        self.tokens, self.length = tokens, length
        self.content = hashlib.sha256(tokens.numpy().data).hexdigest()[:16]
        require(f"{part} text", len(self) > 0, f"{length:,} tokens, a sequence, or more", f"{len(tokens):,}")

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = self.tokens[row * self.length : (row + 1) * self.length].long()
        return {"input_ids": ids, "labels": ids}


def sequences(text: Text, training: Any, tokenizer: Any = None, vocab: int = 0) -> tuple[Any, Sequences, Sequences]:
    """The tokenizer, by default a new one of ``vocab`` tokens, and the text by it: to train on and held out.

    One process makes them once, in the output folder; they are made again if text, options or tokenizer change.
    """
    folder = Path(training.output_dir)
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in text.files()]
    given = tokenizer.backend_tokenizer.to_str() if tokenizer is not None else vocab
    key = hashlib.sha256(repr((files, text.max_mb, text.held_out, given)).encode()).hexdigest()
    path = folder / "tokens.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--output_dir: expected a folder to write to, got {error}") from error
    with training.main_process_first():
        if not path.exists() or torch.load(path, mmap=True)["key"] != key:
            made = new_tokenizer(text, vocab) if tokenizer is None else tokenizer
            parts = tokenised(text, made)
            with _files.replacing(path) as partial:
                torch.save({"key": key, "train": parts[0], "held": parts[1]}, partial)
            made.save_pretrained(folder / "tokenizer")
        saved = torch.load(path, mmap=True)
    made = tokenizer or PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    held = saved["held"][: text.eval_sequences * text.sequence]
    return made, Sequences("training", saved["train"], text.sequence), Sequences("held-out", held, text.sequence)


def tokenised(text: Text, tokenizer: Any) -> list[Tensor]:
    """The tokens of the documents to train on and of those held out: int32 [tokens], each document with its end."""
    parts: tuple[list[Tensor], list[Tensor]] = [], []
    sizes, group = [0, 0], list[str]()

    def flush() -> None:
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(group, add_special_tokens=False)
        for document, encoding in zip(group, encodings, strict=True):
            # never the first document, always the second
            held = sizes[1] < text.held_out * sum(sizes)
            sizes[held] += len(document)
            ids = [*encoding.ids, tokenizer.eos_token_id]
            parts[held].append(torch.tensor(ids, dtype=torch.int32, device="cpu"))
        group.clear()

    waiting = 0
    for document in text.documents(text.max_mb * 1e6):
        group.append(document)
        waiting += len(document)
        if waiting > GROUP:
            flush()
            waiting = 0
    flush()
    require("--text", all(parts), "two documents of UTF-8 text, one of which is held out", f"{len(parts[0])}")
    return [torch.cat(part) for part in parts]


class Chart(TrainerCallback):  # type: ignore[misc]
    """Writes Trainer's log as ``log.jsonl`` and, with matplotlib, losses and non-zeros as ``chart.png``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # the last step is logged
        control.should_log |= state.global_step >= state.max_steps

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write both files again. Raises ValueError, before a checkpoint is saved, if a loss is not finite."""
        names = ("loss", "eval_loss", "grad_norm")
        if lost := [name for name in names if not math.isfinite(float((logs or {}).get(name, 0)))]:
            helps = "a lower --learning_rate or more --warmup_steps help"
            goes_on = "the same command would go on from the last checkpoint"
            raise ValueError(f"{lost[0]} is not finite in step {state.global_step}: {helps}; {goes_on}")
        if state.is_world_process_zero:
            chart(state.log_history, self.folder)


def chart(history: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write ``log.jsonl`` and, with matplotlib, ``chart.png``: losses and non-zeros by step."""
    folder.mkdir(parents=True, exist_ok=True)
    _files.write_text(folder / "log.jsonl", "".join(json.dumps(line) + "\n" for line in history))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, names in zip(figure.subplots(1, 2), (("loss", "eval_loss"), (NON_ZEROS,)), strict=True):
        for name in names:
            points = [(line["step"], line[name]) for line in history if name in line]
            axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name)
        axes.set(xlabel="step", ylabel="loss" if len(names) > 1 else "non-zeros per token")
        axes.legend()
    with _files.replacing(folder / "chart.png") as partial:
        figure.savefig(partial, format="png", dpi=120)


def checkpoint(folder: Path, steps: int) -> str | None:
    """The last complete checkpoint before the last of ``steps``, from which Trainer would take one more."""
    # it writes this file last
    paths = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    found = {int(path.name.rpartition("-")[2]): path for path in paths}
    return str(found[last]) if (last := max((step for step in found if step < steps), default=0)) else None


def fit(
    model: Any, options: Any, training: Any, data: tuple[Any, Sequences, Sequences], callbacks: Sequence[Any] = ()
) -> dict[str, float]:
    """Train from the last checkpoint on, evaluate, save the model as ``final``; return the last figures.

    A run that has ended is not trained again. ValueError if the folder has a run with other options.
    """
    folder = Path(training.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, text, held = data
    path, options = folder / "options.json", json.loads(json.dumps(asdict(options))) | {"text": text.content}
    options |= {name: getattr(training, name) for name in SAME.split()} | {"processes": training.world_size}
    saved = json.loads(path.read_text()) if path.exists() else options
    if differing := [name for name in options if saved.get(name) != options[name]]:
        changes = ", ".join(f"{name} ({saved.get(name)} there, {options[name]} here)" for name in differing)
        raise RequestError(f"{folder} has a run that differs in {changes}; repeat its options or name another folder")
    given = {"train_dataset": text, "eval_dataset": held, "processing_class": tokenizer}
    runner = Trainer(model, training, default_data_collator, callbacks=[*callbacks, Chart(folder)], **given)
    done = folder / "figures.json"
    if not (done.exists() and (folder / "final").is_dir()):
        if runner.is_world_process_zero():
            _files.write_text(path, json.dumps(options, indent=1) + "\n")
        last = checkpoint(folder, training.max_steps)
        training.eval_on_start &= last is None
        runner.train(resume_from_checkpoint=last)
        runner.evaluate()
        runner.save_model(str(folder / "final"))
        if runner.is_world_process_zero():
            _files.write_text(done, json.dumps(dict(ChainMap(*reversed(runner.state.log_history))), indent=1) + "\n")
        training.distributed_state.wait_for_everyone()
    figures: dict[str, float] = json.loads(done.read_text())
    return figures
