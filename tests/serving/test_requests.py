"""What vLLM runs by itself is no request: nothing of it is counted, measured or chosen by."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served import HEADS, ON_GPU, TWO_RANKS, Serve, checkpoint, needs_gpus

# Sequences and tokens of a step in the warm-up below.
SEQUENCES, TOKENS = 64, 2048


class Worker:
    """A worker of vLLM whose model is one layer with "auto": it notes the tokens of each call, and which count."""

    def __init__(self, site: Any) -> None:
        self.site = site
        self.ran: list[int] = []
        self.counted: list[int] = []

    def execute_model(self, planned: Any) -> None:
        self.call(planned.total_num_scheduled_tokens)

    def execute_dummy_batch(self) -> None:
        """As data-parallel ranks without a request do while others have some."""
        self.call(1)

    def call(self, tokens: int) -> None:
        import torch
        from vllm.forward_context import override_forward_context

        # to a layer, vLLM's own runs look like requests
        with override_forward_context(SimpleNamespace(attn_metadata={})):
            self.ran.append(tokens)
            if self.site.heeds(torch.empty(tokens, 8)):
                self.counted.append(tokens)

    def sample_tokens(self, grammar: Any) -> None:
        """Of no model."""


def runner() -> Any:
    """What vLLM's warm-up asks of its second model runner."""
    scheduler = SimpleNamespace(max_num_seqs=SEQUENCES, max_num_batched_tokens=TOKENS)
    cache = SimpleNamespace(
        num_blocks=4096, kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))]
    )
    return SimpleNamespace(
        vllm_config=SimpleNamespace(is_mm_encoder_only=False, num_lookahead_tokens=0),
        model_config=SimpleNamespace(get_vocab_size=lambda: 128),
        scheduler_config=scheduler,
        kv_cache_config=cache,
        kv_connector=SimpleNamespace(set_disabled=lambda disabled: None),
        model_state=SimpleNamespace(),
        adaptive_verification=None,
        rejection_sampler=None,
        speculative_config=None,
        kv_block_zeroer=None,
        is_pooling_model=False,
        is_encoder_decoder=False,
        is_last_pp_rank=True,
        num_speculative_steps=0,
        decode_query_len=1,
        max_num_reqs=SEQUENCES,
        max_model_len=TOKENS,
    )


@pytest.fixture
def worker() -> Worker:
    from twell.integrations._vllm_auto import ServedStrategy, watch

    watch()
    return Worker(ServedStrategy(None))


@pytest.fixture
def executor(worker: Worker) -> Any:
    """The wrapper of ``worker``, whose methods an executor calls."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapper = WorkerWrapperBase()
    wrapper.worker, wrapper.mm_receiver_cache = worker, None  # type: ignore[assignment]
    return wrapper


def planned(tokens: int) -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    plan = SchedulerOutput.make_empty()
    plan.total_num_scheduled_tokens = tokens
    return plan


def test_warm_up_of_the_second_model_runner_does_not_count(
    worker: Worker, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own code makes requests that are all the same and hands them to the worker as the scheduler does."""
    import torch
    from vllm.v1.worker.gpu import warmup

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    model_runner: Any = runner()
    warmup.warmup_kernels(model_runner, worker.execute_model, worker.sample_tokens)
    mixed = warmup.run_mixed_prefill_decode_warmup(model_runner, worker.execute_model, worker.sample_tokens, TOKENS)
    assert mixed
    # prompts of all requests, tokens of all, of two and of one; then a prompt, and another with a token
    assert [tokens for tokens in worker.ran if tokens] == [2 * SEQUENCES, SEQUENCES, 2, 1, 2, TOKENS]
    assert worker.counted == []
    # and before and after requests
    executor.execute_model(planned(TOKENS))
    warmup.warmup_kernels(model_runner, worker.execute_model, worker.sample_tokens)
    executor.execute_dummy_batch()
    executor.execute_model(planned(3))
    # in which a data-parallel rank with an external launcher may run a token of its own
    executor.execute_model(planned(0))
    assert worker.counted == [TOKENS, 3]


def test_graphs_with_and_without_twell_are_kept_apart() -> None:
    from vllm.config import DeviceConfig, VllmConfig

    from twell.integrations._vllm_model import tell_graphs_apart

    device = DeviceConfig("cpu")
    with_twell, without = (VllmConfig(device_config=device, additional_config={"a": 1}) for _ in range(2))
    tell_graphs_apart(with_twell)
    assert with_twell.additional_config["a"] == 1
    assert with_twell.compute_hash() != without.compute_hash()


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["auto", "row"])
def test_two_ranks_on_two_gpus(strategy: str, tmp_path: Path, serve: Serve) -> None:
    needs_gpus(2)
    model = checkpoint(tmp_path, "relu", sizes=HEADS)
    served = serve(model, hf_overrides={"sparsity_strategy": strategy}, enforce_eager=False, **ON_GPU, **TWO_RANKS)
    assert served.layers
    alone = serve(model, plugin=False, model_impl="transformers", **ON_GPU)
    # sums of two halves round otherwise, which later tokens may show
    assert [tokens[0] for tokens in served.tokens] == [tokens[0] for tokens in alone.tokens]


@pytest.mark.gpu
@pytest.mark.parametrize("second", ["0", "1"], ids=["first runner", "second runner"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_no_choice_comes_from_the_start_of_an_engine(eager: bool, second: str, tmp_path: Path, serve: Serve) -> None:
    model = checkpoint(tmp_path, "relu", sizes=HEADS)
    served = serve(model, enforce_eager=eager, variables={"VLLM_USE_V2_MODEL_RUNNER": second}, **ON_GPU)
    started = [row for layer in served.started for row in layer]
    # graphs choose when they are captured, by nothing that was counted
    assert bool(started) == (not eager)
    assert all((calls, nonzeros) == (0, None) for _, calls, nonzeros in started)
    counted = [row for layer in served.choices for row in layer if row[1]]
    assert counted
    assert all(nonzeros is not None for _, _, nonzeros in counted)
