"""Record the steps of vLLM's scheduler: run its engine on a CPU with a tiny model on prompts that were drawn.

Only the sizes of the steps matter, and they do not depend on the model. All requests arrive at once, twice as many as
run at a time, with prompts of 512 to 4,096 tokens and outputs of 64 to 192, in chunks of at most 8,192 tokens. Needs
vLLM's CPU build: run it in the environment of `make test-serving`.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from profiling.serving import steps

PROMPT, OUTPUT, CHUNK = (512, 4096), (64, 192), 8192
VOCABULARY = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, nargs="?", metavar="MODEL", help="folder of a model (default: a tiny random Llama)")
    add("--out", type=Path, required=True, metavar="JSON", help="file for the traces")
    add("--sequences", type=int, nargs="+", default=[64, 256], metavar="N", help="sequences at a time (64 256)")
    add("--prompt", type=int, nargs=2, default=PROMPT, metavar=("MIN", "MAX"), help="tokens of a prompt (512 4096)")
    add("--output", type=int, nargs=2, default=OUTPUT, metavar=("MIN", "MAX"), help="tokens to generate (64 192)")
    add("--chunk", type=int, default=CHUNK, metavar="N", help="most tokens of a step (8192)")


def run(arguments: argparse.Namespace) -> int:
    # before vLLM is imported
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="4",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        VLLM_PLUGINS="",
        HF_HUB_OFFLINE="1",
    )
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or _tiny(Path(folder), arguments.prompt[1] + arguments.output[1])
        traces = [_trace(model, count, arguments) for count in arguments.sequences]
    for trace in traces:
        mixed = [step for step in trace.steps if step.prefill]
        print(f"{trace.name}: {len(trace.steps)} steps, {len(mixed)} with prompts, {trace.requests} requests")
    about = {
        "vllm": vllm.__version__,
        "prompt": list(arguments.prompt),
        "output": list(arguments.output),
        "chunk": arguments.chunk,
    }
    steps.write(arguments.out, traces, about)
    return 0


def _tiny(folder: Path, positions: int) -> Path:
    """Write a Llama of one layer and 64 features."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=positions,
        architectures=["LlamaForCausalLM"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _trace(model: Path, sequences: int, arguments: argparse.Namespace) -> steps.Trace:
    """Serve drawn requests and return the steps."""
    from vllm import LLM, SamplingParams

    engine: Any = LLM(
        str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        max_model_len=arguments.prompt[1] + arguments.output[1],
        max_num_batched_tokens=arguments.chunk,
        max_num_seqs=sequences,
    )
    found: list[steps.Step] = []
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    schedule, lengths = scheduler.schedule, dict[str, int]()

    def watched(*given: Any, **options: Any) -> Any:
        output = schedule(*given, **options)
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        lengths.update({new.req_id: len(new.prompt_token_ids) for new in output.scheduled_new_reqs})
        cached = output.scheduled_cached_reqs
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens))
        if output.num_scheduled_tokens:
            decoding = {request for request, done in before.items() if done >= lengths[request]}
            tokens = output.num_scheduled_tokens
            prefill = sum(count for request, count in tokens.items() if request not in decoding)
            context = sum(before[request] + 1 for request in decoding)
            found.append(steps.Step(prefill, len(decoding), context))
        return output

    scheduler.schedule = watched
    draw, requests = random.Random(0), 2 * sequences
    prompts = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(*arguments.prompt))] for _ in range(requests)]
    wanted = [
        SamplingParams(max_tokens=draw.randint(*arguments.output), temperature=0, ignore_eos=True, detokenize=False)
        for _ in prompts
    ]
    engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    return steps.Trace(sequences, requests, found)
