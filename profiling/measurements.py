"""The results of profiling/results/: what is in each, where it is shown, the commands that make it, and their seconds.

``profiling.everything`` runs them; ``profiling.readme`` fills profiling/results/README.md from them. In a command $OUT
is the file, $FOLDER its folder, $BUDGET the seconds that are left, and $REAL an input: recorded layers
(``profiling.record``). ``FROZEN`` are results whose scripts are gone.
"""

from typing import NamedTuple

INPUTS = {"REAL": "recorded layers 3 and 6 of a model"}


class Measurement(NamedTuple):
    """A file of results, whose machine line names its GPU. ``seconds``: predicted for each command.

    ``host``: its times depend on all of the package, not on the kernels alone, so that it is of one version. ``dated``:
    the file stays as an earlier version measured it.
    """

    name: str
    content: str
    shown: str
    commands: tuple[str, ...]
    seconds: tuple[int, ...]
    host: bool = False
    dated: bool = False


# Of a workload: uneven neurons, uneven tokens, and neurons that neighbouring tokens share.
SHARED = ",skew=1,tokens=0.5,topic=0.5"
LAYERS = "uniform29 skew29 topic29 topic128 dense911 real:$REAL/3 real:$REAL/6"
BENCH = "python -m profiling.bench"
AUTO = f"{BENCH} ffn,train,decode --workload {LAYERS} --m-decode 1,8,64,256 --memory --json $OUT"
ENGINE = "python -m profiling.engine --work $FOLDER/engine"
FEW_FLOAT8 = f"{BENCH} float8 --workload topic29 uniform29 --m 1 8 64 128 256 512 1024 2048 4096 8192 --seconds 0.4"
# Neurons that fire per token, on an even pattern and on one that neighbouring tokens share.
COUNTED = [f"nnz={nnz}{more}" for nnz in (1, 4, 16, 29, 64, 128, 256, 512, 911, 2816) for more in ("", SHARED)]

SEEDS, PORTABLE_SEEDS = range(501, 507), range(1101, 1103)


def _fuzzed(options: str, seeds: range) -> tuple[str, ...]:
    """Runs of the fuzzer, one after the other, which add up in one file."""
    command = f"python -m tests.fuzz {options} --budget-s 355"
    return tuple(f"{command} --seed {seed} --json $OUT" for seed in seeds)


def _one(name: str, content: str, shown: str, command: str, seconds: int, **more: bool) -> Measurement:
    """A measurement by one command."""
    return Measurement(name, content, shown, (command,), (seconds,), **more)


ALL = (
    _one(
        "auto",
        'layers by "auto": forward, training, decoding, errors, memory',
        "headline, forward, training, errors, memory, beside others; chart speedup",
        AUTO,
        160,
    ),
    _one(
        "large_layer",
        "the same for a layer of 4,096 to 14,336",
        "large layer",
        f"{BENCH} ffn,train,decode -k 4096 -n 14336 --workload topic29 uniform29 topic128 --m-decode 1,16,64 "
        "--strategy auto --memory --json $OUT",
        175,
    ),
    _one(
        "screen",
        "layers with and without the int8 screen",
        "screen",
        f"{BENCH} ffn,train --workload real:$REAL/3 topic29 nnz=8,skew=1,dead=0.88 real:$REAL/6 skew29 uniform29 "
        "--strategy union auto --screen --compile none --no-eager --json $OUT",
        50,
    ),
    _one(
        "overfull",
        "training steps with more non-zeros than fit",
        "over-full",
        f"{BENCH} train,train_overflow --workload dense911 nnz=300,skew=1,tokens=0.5 --strategy union "
        "--compile none --json $OUT",
        50,
    ),
    _one(
        "few",
        "layers on 512 to 2,048 tokens",
        "few tokens",
        f"{BENCH} ffn -m 512 1024 2048 --workload topic29 uniform29 --strategy auto --compile none --no-eager "
        "--seconds 0.2 --json $OUT",
        15,
    ),
    _one(
        "decode",
        "layers on 1 to 32 tokens, by the share of neurons that fire",
        "few by share",
        "python -m profiling.bench firing --out $OUT",
        25,
    ),
    _one(
        "host",
        "eager calls: the host, queued, waited for, few tokens",
        "host; constants of rates.py",
        "python -m profiling.bench host --out $OUT",
        200,
        host=True,
    ),
    _one(
        "tuning",
        "times of routes by shape, tokens and pattern",
        'shapes; the rates of "auto"',
        "python -m profiling.tune --budget-s $BUDGET --out $OUT",
        290,
        dated=True,
    ),
    _one(
        "tuning_portable",
        "the same of the portable family",
        'the rates of "auto" there',
        "python -m profiling.tune --portable --budget-s $BUDGET --out $OUT",
        290,
        dated=True,
    ),
    _one(
        "held_out",
        'routes and "auto" at 160 points outside of it',
        "auto losses",
        "python -m profiling.held_out --budget-s $BUDGET --out $OUT",
        240,
    ),
    _one(
        "sweep_nnz",
        "strategies and training by non-zeros, two patterns",
        "chart nnz",
        f"{BENCH} ffn,train --workload {' '.join(COUNTED)} --strategy row,union,auto,dense --no-eager "
        "--seconds 0.3 --json $OUT",
        140,
    ),
    _one(
        "paper_configs",
        "models of 0.5B and 1B, random weights",
        "headline, models, beside the paper",
        f"{BENCH} model --config 0.5B 1B --energy --json $OUT",
        340,
    ),
    _one(
        "paper_configs_large",
        "a model of 1.5B, whose training step needs 83 GB",
        "headline, models, beside the paper",
        f"{BENCH} model --config 1.5B --ops forward train --rounds 4 --json $OUT",
        160,
    ),
    _one(
        "engine_large",
        "vLLM with a drawn model whose layers have Llama-3-8B's sizes",
        "engine large",
        f"{ENGINE} --model large --engines stock dense auto stock-eager auto-eager --cache-gib 3 --out $OUT",
        350,
    ),
    _one(
        "engine_ten",
        "the same with 10 % of the neurons firing",
        "engine ten",
        f"{ENGINE} --model large --nnz 1434 --engines stock auto row --sizes 1 8 32 64 --cache-gib 3 --out $OUT",
        350,
    ),
    _one(
        "engine_small",
        "vLLM with a drawn model of 1.5B",
        "engine small",
        f"{ENGINE} --model 1.5B --engines stock dense auto stock-eager auto-eager --cache-gib 4 --out $OUT",
        420,
    ),
    _one(
        "engine_experts",
        "vLLM with a drawn Nemotron-H of 10 layers",
        "engine experts",
        f"{ENGINE} --model nemotron --engines stock dense auto --sizes 1 8 32 64 128 256 --runs 2 --seconds 280 "
        "--out $OUT",
        245,
    ),
    _one(
        "generate",
        "`generate` of transformers, stock and sparse",
        "generate",
        "python -m profiling.engine.generate --new 64 --out $OUT",
        165,
    ),
    _one(
        "experts",
        "layers of experts beside PyTorch's grouped products",
        "experts; constants of rates.py",
        f"{BENCH} moe --seconds 0.5 --json $OUT",
        40,
    ),
    _one(
        "experts_firing",
        "the same where fewer and more neurons fire",
        "experts elsewhere",
        f"{BENCH} moe --seconds 0.5 --firing 0.03 0.2 --sequences 1 8 64 256 --json $OUT",
        40,
    ),
    _one(
        "experts_skew",
        "the same with uneven routes",
        "experts elsewhere",
        f"{BENCH} moe --seconds 0.5 --skew 1 2 --sequences 1 8 64 256 --json $OUT",
        40,
    ),
    _one(
        "experts_large",
        "the same with larger experts",
        "experts elsewhere",
        f"{BENCH} moe --seconds 0.5 --shapes super ultra --sequences 1 8 64 256 1024 --json $OUT",
        60,
    ),
    _one(
        "experts_gated",
        "the same with a gate",
        "experts elsewhere",
        f"{BENCH} moe --seconds 0.5 --gated --activation relu --sequences 1 8 32 64 128 --json $OUT",
        30,
    ),
    _one(
        "float8",
        "layers of e4m3 weights beside fp8 and bfloat16, errors",
        "float8",
        f"{BENCH} float8 --workload real3 topic29 skew29 real6 uniform29 --real-layers $REAL --seconds 2 --json $OUT",
        110,
    ),
    _one(
        "float8_large",
        "4,096 to 14,336, 1 to 8,192 tokens",
        'float8; table of "auto"',
        f"{FEW_FLOAT8} --k 4096 --n 14336 --json $OUT",
        65,
    ),
    _one("float8_few", "2,048 to 5,632, 1 to 8,192 tokens", 'float8; table of "auto"', f"{FEW_FLOAT8} --json $OUT", 55),
    _one(
        "float8_experts",
        "layers of experts in bfloat16 and in e4m3",
        "float8",
        f"{BENCH} moe --seconds 0.4 --weights bfloat16 e4m3 --json $OUT",
        60,
    ),
    _one("sae", "sparse autoencoders beside dense", "autoencoders", f"{BENCH} sae --json $OUT", 300),
    *(
        _one(
            f"parallel{ranks}",
            f"training steps of 1B on {ranks} GPUs: DDP, FSDP2, tensor parallelism",
            "several GPUs",
            f"python -m torch.distributed.run --nproc-per-node {ranks} -m profiling.parallel --modes ddp fsdp tp "
            "--out $OUT",
            290,
        )
        for ranks in (2, 4)
    ),
    Measurement(
        "fuzz",
        "random layers against float64",
        "fuzz",
        _fuzzed("--cases 4000", SEEDS),
        tuple(365 for _ in SEEDS),
    ),
    Measurement(
        "fuzz_portable",
        "the same for the portable family",
        "fuzz portable",
        _fuzzed("--portable", PORTABLE_SEEDS),
        tuple(365 for _ in PORTABLE_SEEDS),
    ),
    _one(
        "soak", "random layers in threads and streams", "soak", "python -m tests.soak --minutes 15.6 --json $OUT", 950
    ),
    _one(
        "soak_again",
        "others, beside the first soak on the same GPU",
        "soak",
        "python -m tests.soak --minutes 15.6 --first 100000 --json $OUT",
        950,
    ),
    _one("auto_h100", "`auto` on an H100", "headline, layers on an H100", AUTO, 200, dated=True),
    _one(
        "portable",
        "the portable family beside Hopper's",
        "portable calls",
        "python -m profiling.bench portable --out $OUT",
        40,
    ),
    _one(
        "adapters",
        "a layer with LoRA adapters of peft",
        "adapters",
        "python -m profiling.bench adapters --out $OUT",
        120,
    ),
)

# Results of studies that ended, by what is in them. Their tables and charts stay as they are; the scripts are in commit
# 5631cbb, those of the first three in edd511e.
FROZEN = {
    "ncu": "counters of each kernel on `topic29`",
    "paper_code": "the paper's published code beside twell and dense; in chart speedup",
    "float8_loss": "the loss of a small model in bfloat16 and in e4m3",
    "row": '"row" by an old kernel and by `up_down_token`',
    "activations": "layers of each activation beside dense",
    "quality": "cross-entropy and sparsity by L1",
    "relufy": "SiLU models trained further with FATReLU",
    "relufy_model": "the sparsest of them beside dense",
    "training": "the kernels of a training step",
    "training_run": "trainings of 0.5B, dense and sparse",
    "model": "the trained 0.5B model, whole",
    "tuning_h100": 'times of an H100 in `float8_few` and `float8_large`, as `tuning` has them: rates of "auto"',
}


def shown_command(command: str) -> str:
    """A command as a page shows it: words in capitals for what the reader chooses."""
    words = command.replace("$OUT", "FILE").replace("$FOLDER", "OUT")
    for name in INPUTS:
        words = words.replace(f"${name}", name)
    return words.replace(" --budget-s $BUDGET", "")
