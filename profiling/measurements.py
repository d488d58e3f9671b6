"""The results of profiling/results/: what is in each, where it is shown, the commands that make it, and their seconds.

``profiling.everything`` runs them; ``profiling.readme`` fills docs/reproduce.md and profiling/results/README.md from
them. In a command $OUT is the file, $FOLDER its folder, $BUDGET the seconds that are left, and the others are inputs:
$REAL recorded layers (``profiling.record``), $TEXT text, $RUNS a folder for models, which some commands train and
others read. ``FROZEN`` are results whose scripts are gone.
"""

from __future__ import annotations

from typing import NamedTuple

INPUTS = {
    "REAL": "recorded layers 3 and 6 of a model",
    "TEXT": "text to train on",
    "RUNS": "folder for trained models",
}


class Measurement(NamedTuple):
    """A file of results. ``seconds``: predicted for each command on the GPU of its name.

    ``resumes``: a command goes on where it stopped. ``host``: its times depend on all of the package, not on the
    kernels alone, so that it is of one version.
    """

    name: str
    content: str
    shown: str
    commands: tuple[str, ...]
    seconds: tuple[int, ...]
    resumes: bool = False
    host: bool = False

    @property
    def gpu(self) -> str:
        """The GPU of the name, "H100" or "H200"; "" for another name."""
        first = self.name.partition("_")[0].upper()
        return first if first in ("H100", "H200") else ""


LAYERS = "uniform29 skew29 topic29 topic128 dense911 real:$REAL/3 real:$REAL/6"
BENCH = "python -m profiling.bench"
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
SWEEP = "python -m profiling.sweep SWEEP --out $FOLDER --budget-s $BUDGET"

_MEASURED = (
    Measurement(
        "h200_auto",
        'layers forward, in training and decoding, strategy "auto", errors',
        "tables forward, training, decode; chart speedup",
        (f"{BENCH} ffn,train,decode --workload {LAYERS} --m-decode 1,8,64,256 --memory --json $OUT",),
        (150,),
    ),
    Measurement(
        "h200_decode_autotuned",
        "decode beside dense that torch.compile tunes for each number of tokens",
        "table decode autotuned",
        (
            f"{BENCH} decode --workload topic29 uniform29 real:$REAL/3 --m-decode 1,16,64,256 "
            "--compile max-autotune-no-cudagraphs --json $OUT",
        ),
        (120,),
    ),
    Measurement(
        "h200_large_layer",
        "a layer of Llama-3-8B's size, 4,096 to 14,336, forward, in training and decoding",
        "table large layer",
        (
            f"{BENCH} ffn,train,decode -k 4096 -n 14336 --workload topic29 uniform29 topic128 --m-decode 1,16,64 "
            "--strategy row,union,auto --memory --json $OUT",
        ),
        (175,),
    ),
    Measurement(
        "h200_strategies",
        "the layers of `h200_auto` with each strategy",
        "chart roofline",
        (f"{BENCH} ffn,train,decode --workload {LAYERS} --m-decode 1,8,64,256 --strategy row,union,auto --json $OUT",),
        (380,),
    ),
    Measurement(
        "h200_screen",
        "layers with and without the int8 screen of the gate, forward and in training: times, energy, memory",
        "table screen",
        (
            f"{BENCH} ffn,train --workload real:$REAL/3 topic29 nnz=8,skew=1,dead=0.88 real:$REAL/6 skew29 uniform29 "
            "--strategy union auto --screen --compile none --no-eager --energy --memory --json $OUT",
        ),
        (335,),
    ),
    Measurement(
        "h200_screen_model",
        "a 1.5B model with random weights, with and without the screen",
        "table screen model",
        (f"{BENCH} model --config 1.5B --ops forward train --rounds 4 --unscreened --energy --json $OUT",),
        (250,),
    ),
    Measurement(
        "h200_overfull",
        "training steps whose non-zeros exceed the hybrid format, beside dense, with their peak of memory",
        "README; table over-full",
        (
            f"{BENCH} train,train_overflow --workload dense911 nnz=300,skew=1,tokens=0.5 --strategy union "
            "--compile none --memory --json $OUT",
        ),
        (35,),
    ),
    Measurement(
        "h200_few_decode",
        "layers on 1 to 256 tokens, each strategy",
        "README; the page on when it pays",
        (
            f"{BENCH} decode --workload topic29 uniform29 --m-decode 1 16 64 128 256 --strategy row union auto "
            "--compile none --seconds 0.2 --json $OUT",
        ),
        (25,),
    ),
    Measurement(
        "h200_few_ffn",
        "the same on 512 to 2,048 tokens",
        "README; table few tokens",
        (
            f"{BENCH} ffn -m 512 1024 2048 --workload topic29 uniform29 --strategy row union auto --compile none "
            "--seconds 0.2 --json $OUT",
        ),
        (25,),
    ),
    Measurement(
        "h100_host",
        "eager calls as users make them, dense and by strategy: their host time, beside replays of their CUDA graphs, "
        'and of few tokens in the layers of the table of "auto"',
        'table host; seconds by which "auto" counts the host',
        ("python -m profiling.host --out $OUT",),
        (200,),
        host=True,
    ),
    Measurement(
        "h200_tuning",
        "costs of each strategy by shape, tokens and pattern",
        'table shapes; the table of "auto", which --write generates',
        ("python -m profiling.tune --budget-s $BUDGET --out $OUT",),
        (230,),
    ),
    Measurement(
        "h200_held_out",
        'each strategy and "auto" at 100 points outside of that table',
        'table of where "auto" errs',
        ("python -m profiling.held_out --budget-s $BUDGET --out $OUT",),
        (60,),
    ),
    *(
        Measurement(
            f"h200_sweep_{sweep}",
            content,
            shown,
            (SWEEP.replace("SWEEP", sweep) + more,),
            (seconds,),
            resumes=True,
        )
        for sweep, content, shown, seconds, more in (
            ("nnz", "strategies by non-zeros", "chart nnz", 150, ""),
            ("m", "strategies by tokens per call", "chart tokens", 280, ""),
            ("memory", "bytes kept and peaks by non-zeros", "table memory", 60, ""),
            ("kernels", "kernels of named workloads", "chart kernels", 60, " --real $REAL"),
        )
    ),
    Measurement(
        "h200_paper_configs",
        "models of the paper's sizes with random weights: 0.5B and 1B",
        "tables models, configurations, beside the paper",
        (f"{BENCH} model --config 0.5B 1B --energy --json $OUT",),
        (200,),
    ),
    Measurement(
        "h200_paper_configs_large",
        "the same: 1.5B and 2B",
        "tables models, configurations, beside the paper",
        (f"{BENCH} model --config 1.5B 2B --rounds 4 --energy --json $OUT",),
        (280,),
    ),
    Measurement(
        "h200_model_hard",
        "a 1.5B model with random weights whose neighbouring tokens fire other neurons: the hardest pattern",
        "table hard model",
        (f"{BENCH} model --config 1.5B --topic 0 --ops forward train --rounds 4 --json $OUT",),
        (120,),
    ),
    Measurement(
        "h200_engine_large",
        "vLLM's engine with a drawn model whose layers have the sizes of Llama-3-8B's, stock and with twell: steps, "
        "tokens per second, with and without graphs",
        "table engine large",
        (f"{ENGINE} --model large --engines stock dense auto stock-eager auto-eager --cache-gib 3 --out $OUT",),
        (350,),
    ),
    Measurement(
        "h100_engine_small",
        "the same with a drawn model of 1.5B, and what an eager layer costs the host",
        "tables engine small, engine eager",
        (f"{ENGINE} --model 1.5B --engines stock dense auto stock-eager auto-eager --cache-gib 4 --out $OUT",),
        (520,),
    ),
    Measurement(
        "h100_engine_trained",
        "the same with a model of 0.5B, trained for two minutes",
        "table engine trained",
        (
            f"{SERVED} --l1 1e-3 --out $RUNS/served",
            f"{ENGINE} --model $RUNS/served/final --text $TEXT --engines stock dense auto --sizes 1 8 64 256 --runs 2 "
            "--cache-gib 6 --out $OUT",
        ),
        (120, 205),
    ),
    Measurement(
        "h100_engine_experts",
        "the same with a drawn Nemotron-H of 10 layers, 5 of them with experts of Nemotron 3 Nano's sizes",
        "table engine experts",
        (
            f"{ENGINE} --model nemotron --engines stock dense auto --sizes 1 8 32 64 128 256 --runs 2 --seconds 280 "
            "--out $OUT",
        ),
        (280,),
    ),
    Measurement(
        "h100_generate",
        "`generate` of transformers on a drawn model of 16 layers, stock and after `sparsify`",
        "table generate",
        ("python -m profiling.engine.generate --new 64 --out $OUT",),
        (240,),
    ),
    Measurement(
        "h100_experts",
        "a layer of experts of Nemotron 3 Nano's sizes beside grouped products of PyTorch; routes and zeros are drawn",
        "table experts; seconds of experts",
        (f"{BENCH} moe --seconds 0.5 --json $OUT",),
        (40,),
    ),
    Measurement(
        "h100_experts_firing",
        "the same where fewer and more neurons fire",
        "table experts elsewhere",
        (f"{BENCH} moe --seconds 0.5 --firing 0.03 0.2 --sequences 1 8 64 256 --json $OUT",),
        (40,),
    ),
    Measurement(
        "h100_experts_skew",
        "the same with uneven routes",
        "table experts elsewhere",
        (f"{BENCH} moe --seconds 0.5 --skew 1 2 --sequences 1 8 64 256 --json $OUT",),
        (40,),
    ),
    Measurement(
        "h100_experts_large",
        "the same with experts of the sizes of Super and Ultra",
        "table experts elsewhere",
        (f"{BENCH} moe --seconds 0.5 --shapes super ultra --sequences 1 8 64 256 1024 --json $OUT",),
        (60,),
    ),
    Measurement(
        "h100_experts_gated",
        "the same with a gate",
        "table experts elsewhere",
        (f"{BENCH} moe --seconds 0.5 --gated --activation relu --sequences 1 8 32 64 128 --json $OUT",),
        (30,),
    ),
    Measurement(
        "h100_float8",
        "layers of e4m3 weights beside dense fp8 and bfloat16, in graphs and in eager calls, with errors",
        "table float8",
        (
            f"{BENCH} float8 --workload real3 topic29 skew29 real6 uniform29 --real-layers $REAL --compile --seconds 2 "
            "--json $OUT",
        ),
        (110,),
    ),
    Measurement(
        "h100_float8_large",
        "the same for a layer of 4,096 to 14,336 on 1 to 8,192 tokens, graphs alone",
        'table float8; seconds by which "auto" chooses',
        (f"{FEW_FLOAT8} --k 4096 --n 14336 --json $OUT",),
        (65,),
    ),
    Measurement(
        "h100_float8_few",
        "the same for a layer of 2,048 to 5,632",
        'table float8; seconds by which "auto" chooses',
        (f"{FEW_FLOAT8} --json $OUT",),
        (55,),
    ),
    Measurement(
        "h100_float8_experts",
        "a layer of experts of Nemotron 3 Nano's sizes in bfloat16 and in e4m3; routes and zeros are drawn",
        "table float8",
        (f"{BENCH} moe --seconds 0.4 --weights bfloat16 e4m3 --json $OUT",),
        (60,),
    ),
    Measurement(
        "h100_float8_loss",
        "the loss of a small trained model on held-back text, with layers in bfloat16 and in e4m3",
        "table float8",
        (f"{BENCH} float8 --loss 60 --json $OUT",),
        (85,),
    ),
    Measurement(
        "h100_sae",
        "sparse autoencoders, JumpReLU of even and of skewed neurons and TopK, forward and in training, beside dense; "
        "the peak of memory of a step",
        "page on sparse autoencoders",
        (f"{BENCH} sae --json $OUT",),
        (300,),
    ),
    Measurement(
        "h200_training_run",
        "trainings of 0.5B, dense and sparse, step by step",
        "table training run",
        (
            f"{TRAIN} --ffn dense --l1 1e-4 --out $RUNS/dense",
            f"{TRAIN} --strategy dense --l1 1e-4 --out $RUNS/dense-again",
            f"{TRAIN} --l1 1e-4 --out $RUNS/sparse",
            f"{TRAIN} --l1 3e-4 --out $RUNS/sparser",
            'python -m profiling.training_run dense=$RUNS/dense "dense again=$RUNS/dense-again" sparse=$RUNS/sparse '
            '"sparse, L1 3e-4=$RUNS/sparser" --out $OUT',
        ),
        (190, 190, 160, 150, 5),
    ),
    Measurement(
        "h200_model",
        "the trained 0.5B model, whole, with energy",
        "tables models, model",
        (MODEL.replace("RUN/", "sparse/"),),
        (110,),
    ),
    Measurement(
        "h200_model_sparser",
        "the same, trained with L1 of 3e-4",
        "table sparser model",
        (MODEL.replace("RUN/", "sparser/"),),
        (110,),
    ),
    Measurement(
        "h200_sweep_layers",
        "the recorded layers of a trained model, one at a time",
        "table layers",
        (
            "python -m profiling.record $RUNS/sparse/final --text $TEXT --tokens 16384 --layers 0 1 2 3 4 5 6 7 "
            "--out $FOLDER/recorded",
            SWEEP.replace("SWEEP", "layers") + " --real $FOLDER/recorded",
        ),
        (30, 70),
        resumes=True,
    ),
    Measurement(
        "h200_fuzz",
        "random layers against float64: numbers of cases, largest errors, mismatches",
        "paragraph in the page on development",
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
        "the same for the portable family of kernels",
        "paragraph in the page on development",
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
        "random layers in several threads and streams: calls, repeats bit for bit, memory, on an H100",
        "paragraph in the page on development",
        ("python -m tests.soak --minutes 25.3 --json $OUT",),
        (1540,),
    ),
    Measurement(
        "h200_ncu",
        "counters of each kernel on `topic29`, and floors",
        "table in the page on profiling",
        (
            "profiling/nsight/ncu.sh gate_pack,up_down,up_down_union,train_backward --workload topic29 --calls 1 "
            "--out $FOLDER/ncu",
            "python -m profiling.nsight.summarize $FOLDER/ncu.csv --floor $FOLDER/ncu.json --json $OUT",
        ),
        (180, 5),
    ),
    Measurement(
        "h100_portable",
        "calls and kernels of the portable family beside Hopper's",
        "tables portable calls, portable kernels",
        ("python -m profiling.portable --json $OUT",),
        (40,),
    ),
    Measurement(
        "h100_adapters",
        "a layer with LoRA adapters of peft, which must be installed, dense and sparse",
        "table adapters",
        ("python -m profiling.adapters --json $OUT",),
        (120,),
    ),
)

# Of these, the names that were measured on an H100, too.
_ON_H100 = ("h200_auto", "h200_held_out", "h200_large_layer", "h200_paper_configs")


def on_h100(measurement: Measurement) -> Measurement:
    """A measurement on an H100 beside that on an H200."""
    name = measurement.name.replace("h200", "h100")
    return measurement._replace(
        name=name, content=f"`{measurement.name}` on an H100", shown="tables in the page on GPUs"
    )


# Results of studies that ended on 2026-11-26, by what is in them. Their tables and charts stay as they are; the scripts
# are in commit 5631cbb.
FROZEN = {
    "h100_batches": "continuous batching of transformers, stock and sparse, on an H100",
    "h100_paper_code": "the paper's published kernels, dense and twell on the same layers, on an H100",
    "h100_row": '"row" by the old kernel up_down and by up_down_token, beside others; no script kept',
    "h100_row_clusters": 'the gate of few tokens by kernel, and "row" by CTAs of a token, on an H100; no script kept',
    "h100_upgrade": "layers by version 0.2.0 and by the next, in CUDA graphs; no script kept, training in a second run",
    "h200_activations": "layers of each activation on the same pattern beside dense",
    "h200_fp8": "dense in fp8 beside dense in bf16 and twell, with its errors",
    "h200_gate_tiles": "the gate GEMM with every size of its tiles beside cuBLAS, from 1 to 16,384 tokens",
    "h200_parallel": "training steps on two GPUs by DDP, FSDP2 and tensor parallelism, dense and sparse",
    "h200_quality": "cross-entropy and sparsity by coefficient of L1",
    "h200_relufy": "SiLU models trained further with SiLU and with FATReLU",
    "h200_relufy_model": "the forward pass of the sparsest of them beside dense",
    "h200_row_clusters": "the same on an H200",
    "h200_training": "the kernels of a training step, and of one that overflows",
}

ALL = (*_MEASURED, *(on_h100(each) for each in _MEASURED if each.name in _ON_H100))


def shown_command(command: str) -> str:
    """A command as a page shows it: words in capitals for what the reader chooses."""
    words = command.replace("$OUT", "FILE").replace("$FOLDER", "OUT")
    for name in INPUTS:
        words = words.replace(f"${name}", name)
    return words.replace(" --budget-s $BUDGET", "")
