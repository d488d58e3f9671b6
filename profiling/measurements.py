"""The results of profiling/results/: what is in each, where it is shown, the commands that make it, and their seconds.

``profiling.everything`` runs them; ``profiling.readme`` fills profiling/results/README.md from them. In a command $OUT
is the file, $FOLDER its folder, $BUDGET the seconds that are left, and the others are inputs: $REAL recorded layers
(``profiling.record``), $TEXT text, $RUNS a folder for models, which some commands train and others read. ``FROZEN`` are
results whose scripts are gone.
"""

from __future__ import annotations

from typing import NamedTuple

INPUTS = {
    "REAL": "recorded layers 3 and 6 of a model",
    "TEXT": "text to train on",
    "RUNS": "folder for trained models",
    "PACKAGE": "checkout of github.com/SakanaAI/sparser-faster-llms",
}


class Measurement(NamedTuple):
    """A file of results. ``seconds``: predicted for each command on the GPU of its name.

    ``host``: its times depend on all of the package, not on the kernels alone, so that it is of one version. ``dated``:
    the file stays as version 0.2.0 measured it.
    """

    name: str
    content: str
    shown: str
    commands: tuple[str, ...]
    seconds: tuple[int, ...]
    host: bool = False
    dated: bool = False

    @property
    def gpu(self) -> str:
        """The GPU of the name, "H100" or "H200"; "" for another name."""
        first = self.name.partition("_")[0].upper()
        return first if first in ("H100", "H200") else ""


SHARED = ",skew=1,tokens=0.5,topic=0.5"
LAYERS = "uniform29 skew29 topic29 topic128 dense911 real:$REAL/3 real:$REAL/6"
BENCH = "python -m profiling.bench"
AUTO = f"{BENCH} ffn,train,decode --workload {LAYERS} --m-decode 1,8,64,256 --memory --json $OUT"
# Trainings of one model, which differ in the last options.
TRAIN = (
    "python examples/train.py --config 0.5B --text $TEXT --max-bytes 136314880 --steps 350 --tokens-per-step 65536 "
    "--micro-batch 8 --warmup 20 --l1-warmup 40"
)
SERVED = (
    "python examples/train.py --config 0.5B --heads 16 --text $TEXT --max-bytes 40000000 --steps 120 "
    "--tokens-per-step 32768 --micro-batch 8 --warmup 15 --l1-warmup 30 --checkpoint-every 0"
)
MODEL = f"{BENCH} model $RUNS/RUN/final --text $TEXT --accumulate 4 --energy --json $OUT"
ENGINE = "python -m profiling.engine --work $FOLDER/engine"
FEW_FLOAT8 = (
    f"{BENCH} float8 --workload topic29 uniform29 --m 1 8 64 128 256 512 1024 2048 4096 8192 --seconds 0.4 --no-eager"
)
# Neurons that fire per token, on an even pattern and on one that neighbouring tokens share.
COUNTED = [f"nnz={nnz}{more}" for nnz in (1, 4, 16, 29, 64, 128, 256, 512, 911, 2816) for more in ("", SHARED)]

ALL = (
    Measurement(
        "h100_auto",
        'layers by "auto": forward, training, decoding, errors, memory',
        "headline, layers, forward, training, errors, decode, memory; chart speedup",
        (AUTO,),
        (200,),
    ),
    Measurement(
        "h100_large_layer",
        "the same for a layer of 4,096 to 14,336",
        "large layer",
        (
            f"{BENCH} ffn,train,decode -k 4096 -n 14336 --workload topic29 uniform29 topic128 --m-decode 1,16,64 "
            "--strategy auto --memory --json $OUT",
        ),
        (175,),
    ),
    Measurement(
        "h100_screen",
        "layers with and without the int8 screen",
        "screen",
        (
            f"{BENCH} ffn,train --workload real:$REAL/3 topic29 nnz=8,skew=1,dead=0.88 real:$REAL/6 skew29 uniform29 "
            "--strategy union auto --screen --compile none --no-eager --json $OUT",
        ),
        (200,),
    ),
    Measurement(
        "h100_overfull",
        "training steps with more non-zeros than fit",
        "over-full",
        (
            f"{BENCH} train,train_overflow --workload dense911 nnz=300,skew=1,tokens=0.5 --strategy union "
            "--compile none --json $OUT",
        ),
        (35,),
    ),
    Measurement(
        "h100_few",
        "layers on 512 to 2,048 tokens",
        "few tokens",
        (
            f"{BENCH} ffn -m 512 1024 2048 --workload topic29 uniform29 --strategy auto --compile none --no-eager "
            "--seconds 0.2 --json $OUT",
        ),
        (25,),
    ),
    Measurement(
        "h100_host",
        "eager calls: the host, queued, waited for, few tokens",
        "host; constants of costs.py",
        ("python -m profiling.host --out $OUT",),
        (200,),
        host=True,
    ),
    Measurement(
        "h200_tuning",
        "costs by shape, tokens and pattern",
        'shapes; the table of "auto"',
        ("python -m profiling.tune --budget-s $BUDGET --out $OUT",),
        (230,),
        dated=True,
    ),
    Measurement(
        "h100_held_out",
        'strategies and "auto" at 100 points outside of it',
        "auto losses",
        ("python -m profiling.held_out --budget-s $BUDGET --out $OUT",),
        (60,),
    ),
    Measurement(
        "h100_sweep_nnz",
        "strategies and training by non-zeros, two patterns",
        "chart nnz",
        (
            f"{BENCH} ffn,train --workload {' '.join(COUNTED)} --strategy row,union,auto,dense --no-eager "
            "--seconds 0.3 --json $OUT",
        ),
        (330,),
    ),
    Measurement(
        "h100_paper_configs",
        "models of 0.5B and 1B, random weights",
        "headline, models, some models, beside the paper",
        (f"{BENCH} model --config 0.5B 1B --energy --json $OUT",),
        (200,),
    ),
    Measurement(
        "h200_paper_configs_large",
        "a model of 1.5B, whose training step an H100 does not hold",
        "headline, models, some models, beside the paper",
        (f"{BENCH} model --config 1.5B --ops forward train --rounds 4 --json $OUT",),
        (160,),
    ),
    Measurement(
        "h200_engine_large",
        "vLLM with a drawn model whose layers have Llama-3-8B's sizes",
        "engine large",
        (f"{ENGINE} --model large --engines stock dense auto stock-eager auto-eager --cache-gib 3 --out $OUT",),
        (350,),
        dated=True,
    ),
    Measurement(
        "h100_engine_small",
        "vLLM with a drawn model of 1.5B",
        "no table; text of docs/serving.md",
        (f"{ENGINE} --model 1.5B --engines stock dense auto stock-eager auto-eager --cache-gib 4 --out $OUT",),
        (520,),
    ),
    Measurement(
        "h100_engine_trained",
        "vLLM with a model of 0.5B, trained for two minutes",
        "no table",
        (
            f"{SERVED} --l1 1e-3 --out $RUNS/served",
            f"{ENGINE} --model $RUNS/served/final --text $TEXT --engines stock dense auto --sizes 1 8 64 256 --runs 2 "
            "--cache-gib 6 --out $OUT",
        ),
        (120, 205),
    ),
    Measurement(
        "h100_engine_experts",
        "vLLM with a drawn Nemotron-H of 10 layers",
        "engine experts",
        (
            f"{ENGINE} --model nemotron --engines stock dense auto --sizes 1 8 32 64 128 256 --runs 2 --seconds 280 "
            "--out $OUT",
        ),
        (280,),
    ),
    Measurement(
        "h100_generate",
        "`generate` of transformers, stock and sparse",
        "generate",
        ("python -m profiling.engine.generate --new 64 --out $OUT",),
        (240,),
    ),
    Measurement(
        "h100_experts",
        "layers of experts beside PyTorch's grouped products",
        "experts; constants of costs.py",
        (f"{BENCH} moe --seconds 0.5 --json $OUT",),
        (40,),
    ),
    Measurement(
        "h100_experts_firing",
        "the same where fewer and more neurons fire",
        "experts elsewhere",
        (f"{BENCH} moe --seconds 0.5 --firing 0.03 0.2 --sequences 1 8 64 256 --json $OUT",),
        (40,),
    ),
    Measurement(
        "h100_experts_skew",
        "the same with uneven routes",
        "experts elsewhere",
        (f"{BENCH} moe --seconds 0.5 --skew 1 2 --sequences 1 8 64 256 --json $OUT",),
        (40,),
    ),
    Measurement(
        "h100_experts_large",
        "the same with larger experts",
        "experts elsewhere",
        (f"{BENCH} moe --seconds 0.5 --shapes super ultra --sequences 1 8 64 256 1024 --json $OUT",),
        (60,),
    ),
    Measurement(
        "h100_experts_gated",
        "the same with a gate",
        "experts elsewhere",
        (f"{BENCH} moe --seconds 0.5 --gated --activation relu --sequences 1 8 32 64 128 --json $OUT",),
        (30,),
    ),
    Measurement(
        "h100_float8",
        "layers of e4m3 weights beside fp8 and bfloat16, errors",
        "float8",
        (
            f"{BENCH} float8 --workload real3 topic29 skew29 real6 uniform29 --real-layers $REAL --compile --seconds 2 "
            "--json $OUT",
        ),
        (110,),
    ),
    Measurement(
        "h100_float8_large",
        "4,096 to 14,336, 1 to 8,192 tokens",
        "float8; constants of costs.py",
        (f"{FEW_FLOAT8} --k 4096 --n 14336 --json $OUT",),
        (65,),
    ),
    Measurement(
        "h100_float8_few",
        "2,048 to 5,632, 1 to 8,192 tokens",
        "float8; constants of costs.py",
        (f"{FEW_FLOAT8} --json $OUT",),
        (55,),
    ),
    Measurement(
        "h100_float8_experts",
        "layers of experts in bfloat16 and in e4m3",
        "float8",
        (f"{BENCH} moe --seconds 0.4 --weights bfloat16 e4m3 --json $OUT",),
        (60,),
    ),
    Measurement(
        "h100_float8_loss",
        "the loss of a small model in bfloat16 and in e4m3",
        "float8",
        (f"{BENCH} float8 --loss 60 --json $OUT",),
        (85,),
    ),
    Measurement(
        "h100_sae",
        "sparse autoencoders beside dense",
        "autoencoders",
        (f"{BENCH} sae --json $OUT",),
        (300,),
    ),
    Measurement(
        "h100_paper_code",
        "the paper's published code beside twell and dense",
        "paper's code; chart speedup",
        ("python -m profiling.paper_code --package $PACKAGE --real $REAL --json $OUT",),
        (70,),
    ),
    *(
        Measurement(
            f"h100_parallel{ranks}",
            f"training steps of 1B on {ranks} GPUs: DDP, FSDP2, tensor parallelism",
            "several GPUs",
            (
                f"python -m torch.distributed.run --nproc-per-node {ranks} -m profiling.parallel --modes ddp fsdp tp "
                "--out $OUT",
            ),
            (150,),
        )
        for ranks in (2, 4)
    ),
    Measurement(
        "h200_training_run",
        "trainings of 0.5B, dense and sparse",
        "trained model",
        (
            f"{TRAIN} --ffn dense --l1 1e-4 --out $RUNS/dense",
            f"{TRAIN} --strategy dense --l1 1e-4 --out $RUNS/dense-again",
            f"{TRAIN} --l1 1e-4 --out $RUNS/sparse",
            f"{TRAIN} --l1 3e-4 --out $RUNS/sparser",
            'python -m profiling.training_run dense=$RUNS/dense "dense again=$RUNS/dense-again" sparse=$RUNS/sparse '
            '"sparse, L1 3e-4=$RUNS/sparser" --out $OUT',
        ),
        (190, 190, 160, 150, 5),
        dated=True,
    ),
    Measurement(
        "h200_model",
        "the trained 0.5B model, whole",
        "trained model, trained speed-ups",
        (MODEL.replace("RUN/", "sparse/"),),
        (110,),
        dated=True,
    ),
    Measurement(
        "h100_fuzz",
        "random layers against float64",
        "fuzz",
        (
            "python -m tests.fuzz --budget-s 320 --cases 7000 --seed 201 --ledger $FOLDER/fuzz-201.jsonl",
            "python -m tests.fuzz --budget-s 320 --cases 7000 --seed 202 --ledger $FOLDER/fuzz-202.jsonl",
            "python -m tests.fuzz --budget-s 320 --cases 7000 --seed 203 --ledger $FOLDER/fuzz-203.jsonl",
            "python -m tests.fuzz --summary $FOLDER/fuzz-201.jsonl $FOLDER/fuzz-202.jsonl $FOLDER/fuzz-203.jsonl "
            "--json $OUT",
        ),
        (330, 330, 330, 5),
    ),
    Measurement(
        "h100_fuzz_portable",
        "the same for the portable family",
        "fuzz portable",
        (
            *(
                f"python -m tests.fuzz --portable --budget-s 380 --seed {seed} --ledger $FOLDER/portable-{seed}.jsonl"
                for seed in range(1001, 1005)
            ),
            "python -m tests.fuzz --summary $FOLDER/portable-1001.jsonl $FOLDER/portable-1002.jsonl "
            "$FOLDER/portable-1003.jsonl $FOLDER/portable-1004.jsonl --json $OUT",
        ),
        (390, 390, 390, 390, 5),
    ),
    Measurement(
        "h100_soak",
        "random layers in threads and streams",
        "soak",
        ("python -m tests.soak --minutes 25.3 --json $OUT",),
        (1540,),
    ),
    Measurement(
        "h200_auto",
        "`h100_auto` on an H200",
        "headline, layers on an H200",
        (AUTO,),
        (200,),
        dated=True,
    ),
    Measurement(
        "h200_ncu",
        "counters of each kernel on `topic29`",
        "ncu",
        (
            "profiling/nsight/ncu.sh gate_pack,up_down,up_down_union,train_backward --workload topic29 --calls 1 "
            "--out $FOLDER/ncu",
            "python -m profiling.nsight.summarize $FOLDER/ncu.csv --floor $FOLDER/ncu.json --json $OUT",
        ),
        (180, 5),
        dated=True,
    ),
    Measurement(
        "h100_portable",
        "the portable family beside Hopper's",
        "portable calls",
        ("python -m profiling.portable --json $OUT",),
        (40,),
    ),
    Measurement(
        "h100_adapters",
        "a layer with LoRA adapters of peft",
        "adapters",
        ("python -m profiling.adapters --json $OUT",),
        (120,),
    ),
)

# Files that tables and charts read until the measurement of the other name is there. Then the line goes, and the file.
UNTIL = {
    "h100_screen": "h200_screen",
    "h100_overfull": "h200_overfull",
    "h100_few": "h200_few_ffn",
    "h100_sweep_nnz": "h200_sweep_nnz",
    "h100_fuzz": "h200_fuzz",
}


def published(name: str) -> str:
    """The file of results that tables of a measurement read."""
    return UNTIL.get(name, name)


# Results of studies that ended on 2026-11-26, by what is in them. Their tables and charts stay as they are; the scripts
# are in commit 5631cbb.
FROZEN = {
    "h100_row": '"row" by an old kernel and by `up_down_token`',
    "h200_activations": "layers of each activation beside dense",
    "h200_parallel": "training steps on two GPUs",
    "h200_quality": "cross-entropy and sparsity by L1",
    "h200_relufy": "SiLU models trained further with FATReLU",
    "h200_relufy_model": "the sparsest of them beside dense",
    "h200_training": "the kernels of a training step",
}


def shown_command(command: str) -> str:
    """A command as a page shows it: words in capitals for what the reader chooses."""
    words = command.replace("$OUT", "FILE").replace("$FOLDER", "OUT")
    for name in INPUTS:
        words = words.replace(f"${name}", name)
    return words.replace(" --budget-s $BUDGET", "")
