"""The command line of ``train.py``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from .model import SHAPES

DTYPES = ("float32", "bfloat16")
# Options that a resumed run must share with the saved one; only steps may grow. All others may change: they set where,
# how fast and in which order of summation the run computes the same function.
IDENTITY = (
    *("layers", "hidden", "intermediate", "heads", "vocab", "activation", "sequence", "dtype", "seed"),
    *("steps", "tokens_per_step"),
    *("lr", "min_lr", "warmup", "weight_decay", "clip", "l1", "l1_warmup", "reinitialize", "observe_every"),
    "target_nnz",
)


def parse(description: str, arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "train.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    group = parser.add_argument_group("model")
    group.add_argument("--config", choices=SHAPES, default="125M", help="sizes by name (default 125M)")
    group.add_argument("--layers", type=positive, metavar="N", help="replaces the configuration's, as do the next four")
    group.add_argument("--hidden", type=positive, metavar="N", help="size of the residual stream")
    group.add_argument("--intermediate", type=positive, metavar="N", help="neurons of an FFN")
    group.add_argument("--heads", type=positive, metavar="N", help="heads of attention")
    group.add_argument("--vocab", type=positive, metavar="N", help="size of the vocabulary")
    group.add_argument(
        "--ffn", choices=["sparse", "dense"], default="sparse", help="dense: the same function, compiled"
    )
    group.add_argument(
        "--strategy",
        choices=["auto", "dense", "row", "union"],
        default="auto",
        help="strategy of sparse FFNs",
    )
    group.add_argument(
        "--activation",
        choices=["relu", "silu"],
        default="relu",
        help="silu: a stock Llama for comparison, without zeros; needs --ffn dense",
    )

    group = parser.add_argument_group("data")
    group.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="PATH", help="text files, or folders of them"
    )
    group.add_argument(
        "--suffix", nargs="+", default=[], metavar=".EXT", help="only files of --text with these endings"
    )
    group.add_argument(
        "--dataset", type=Path, metavar="PATH", help="a folder of save_to_disk, or Parquet or JSON Lines files"
    )
    group.add_argument("--column", default="text", metavar="NAME", help="column of the dataset (default text)")
    group.add_argument("--max-bytes", type=size, default="1G", metavar="SIZE", help="text to read (default 1G)")
    group.add_argument(
        "--held-out", type=float, default=0.02, metavar="SHARE", help="held-out share of the text (default 0.02)"
    )
    group.add_argument(
        "--sequence", type=positive, default=2048, metavar="TOKENS", help="length of a sequence (default 2048)"
    )
    group.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="cache of tokens; runs may share it (default OUT/cache)"
    )

    group = parser.add_argument_group("optimisation")
    group.add_argument("--steps", type=positive, default=1000, metavar="N", help="total steps (default 1000)")
    group.add_argument("--tokens-per-step", type=positive, default=1 << 20, metavar="N", help="default 1048576")
    group.add_argument("--micro-batch", type=positive, default=8, metavar="N", help="sequences at a time (default 8)")
    group.add_argument(
        "--lr", type=rate, default=1e-3, metavar="RATE", help="peak learning rate of AdamW (default 1e-3)"
    )
    group.add_argument(
        "--min-lr", type=rate, metavar="RATE", help="learning rate at the end (default: a tenth of --lr)"
    )
    group.add_argument(
        "--warmup", type=natural, metavar="STEPS", help="warm-up of the rate (default: a twentieth of --steps)"
    )
    group.add_argument("--weight-decay", type=rate, default=0.1, metavar="RATE", help="for matrices only (default 0.1)")
    group.add_argument(
        "--clip", type=rate, default=1.0, metavar="NORM", help="largest gradient norm (default 1; 0: never clip)"
    )
    group.add_argument(
        "--seed", type=natural, default=0, metavar="N", help="initial weights and order of text (default 0)"
    )

    group = parser.add_argument_group("sparsity")
    group.add_argument(
        "--l1",
        type=rate,
        metavar="RATE",
        help="coefficient of L1 (default 2e-5, for long runs of 0.5B and more; SiLU: 0). For 30 M start with 1e-3; "
        "raise it while well over 1 %% of the neurons fire, lower it if the cross-entropy rises too far",
    )
    group.add_argument(
        "--target-nnz",
        type=rate,
        metavar="N",
        help="instead of --l1: non-zeros per token to reach after 60%% of --steps, by a coefficient that follows them",
    )
    group.add_argument(
        "--l1-warmup", type=natural, metavar="STEPS", help="warm-up of the coefficient (default: --warmup)"
    )
    group.add_argument(
        "--reinitialize",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="noise mixed into the gates of dead neurons at each step; the paper has 0.1 (default 0: never)",
    )
    group.add_argument(
        "--observe-every",
        type=natural,
        default=50,
        metavar="STEPS",
        help="interval of looking for dead neurons (default 50)",
    )

    group = parser.add_argument_group("machine")
    group.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if available")
    group.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="dtype of products; weights stay float32 (default bfloat16)"
    )
    group.add_argument(
        "--parallel", choices=["ddp", "fsdp", "tp"], help="under torchrun (default ddp); tp is never compiled"
    )
    group.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="with torch.compile (default: on cuda, except --parallel tp, whose DTensors it cannot trace)",
    )
    group.add_argument("--checkpoint-activations", action="store_true", help="recompute activations to save memory")

    group = parser.add_argument_group("output")
    group.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="checkpoints, metrics and the model")
    group.add_argument("--log-every", type=positive, default=10, metavar="STEPS", help="default 10")
    group.add_argument(
        "--eval-every", type=natural, default=0, metavar="STEPS", help="default 0: only after the last step"
    )
    group.add_argument(
        "--eval-sequences", type=positive, default=64, metavar="N", help="held-out sequences to evaluate (default 64)"
    )
    group.add_argument("--checkpoint-every", type=natural, default=500, metavar="STEPS", help="default 500; 0: never")
    group.add_argument("--keep", type=positive, default=2, metavar="N", help="checkpoints to keep (default 2)")
    group.add_argument("--tensorboard", action="store_true", help="also write sparsity to TensorBoard")
    group.add_argument(
        "--resume", default="auto", metavar="auto|never|PATH", help="default auto: from the last checkpoint of OUT"
    )

    options = parser.parse_args(arguments)
    if bool(options.text) == (options.dataset is not None):
        parser.error("expected either --text or --dataset")
    if not 0 < options.held_out < 1:
        parser.error(f"--held-out: expected a share between 0 and 1, got {options.held_out}")
    if not 0 <= options.reinitialize <= 1:
        parser.error(f"--reinitialize: expected a share between 0 and 1, got {options.reinitialize}")
    return with_defaults(options, parser)


def rate(text: str) -> float:
    """Parse a finite number of at least 0."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text}")
    return number


def natural(text: str, least: int = 0) -> int:
    if (number := int(text)) < least:
        raise argparse.ArgumentTypeError(f"expected {least} or more, got {number}")
    return number


def positive(text: str) -> int:
    return natural(text, 1)


def size(text: str) -> int:
    """Parse a number of bytes, as in 4096, 100M or 1.5G."""
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper())
    return positive(str(int(float(text[:-1]) * unit))) if unit else positive(text)


def with_defaults(options: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Fill in the options that follow from others, and check all."""
    shape = SHAPES[options.config]
    for name in ("layers", "hidden", "intermediate", "heads", "vocab"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(shape, name))
    if options.hidden % (2 * options.heads):
        parser.error(f"--hidden: expected a multiple of twice the {options.heads} heads, got {options.hidden}")
    for name in ("hidden", "intermediate"):
        if getattr(options, name) % 8:
            parser.error(
                f"--{name}: expected a multiple of 8, which the sparse kernels need, got {getattr(options, name)}"
            )
    if options.vocab < 257:
        parser.error(f"--vocab: expected 257 or more, the bytes and the end of a document, got {options.vocab}")
    if options.target_nnz is not None and (options.l1 is not None or not options.target_nnz):
        got = f"{options.target_nnz:g}" + ("" if options.l1 is None else f" and --l1 {options.l1:g}")
        parser.error(f"--target-nnz: expected a number above 0, without --l1, got {got}")
    if options.target_nnz is not None and options.target_nnz >= options.intermediate:
        parser.error(
            f"--target-nnz: expected less than the {options.intermediate} neurons of a layer, "
            f"got {options.target_nnz:g}"
        )
    if options.l1 is None:
        options.l1 = 2e-5 if options.activation == "relu" and options.target_nnz is None else 0.0
    if options.activation == "silu":
        expected = {"ffn": "dense", "l1": 0, "reinitialize": 0, "target_nnz": None}
        for name, value in expected.items():
            if (got := getattr(options, name)) != value:
                why = "--activation silu, which sets nothing to zero"
                parser.error(f"--{name.replace('_', '-')}: expected {value} with {why}, got {got}")
        if options.parallel == "tp":
            parser.error("--parallel: expected ddp or fsdp with --activation silu, got tp, which divides sparse FFNs")
    if options.min_lr is not None and options.min_lr > options.lr:
        parser.error(f"--min-lr: expected at most --lr {options.lr:g}, got {options.min_lr:g}")
    if options.reinitialize and not options.observe_every:
        parser.error("--reinitialize: expected --observe-every of 1 or more, which finds dead neurons, got 0")
    if options.min_lr is None:
        options.min_lr = options.lr / 10
    # an extended run keeps the defaults of its first number of steps
    options.implied = [name for name in ("warmup", "l1_warmup") if getattr(options, name) is None]
    if options.warmup is None:
        options.warmup = options.steps // 20
    if options.l1_warmup is None:
        options.l1_warmup = options.warmup
    if options.cache is None:
        options.cache = options.out / "cache"
    return options
