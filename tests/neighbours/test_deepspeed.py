"""DeepSpeed: a step of ZeRO-1 and ZeRO-2, ZeRO-3's partitioned weights refused by name."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from neighbours import after_step, causal_model, logits, same_step, sparse_model, strategies, token_ids
from torch import nn

import twell.integrations.transformers as twell_hf

KINDS = pytest.mark.parametrize("kind", ["llama", "opt"])


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """DeepSpeed on the CPU, a process group of this process alone."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    # zero.Init replaces it for good
    monkeypatch.setattr(F, "linear", F.linear)
    deepspeed = pytest.importorskip("deepspeed")
    # a C++ extension for several processes, which takes a minute to compile
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield deepspeed
    deepspeed.comm.destroy_process_group()
    # zero.Init leaves it on all modules, and generic classes that are made later then fail
    if "__init_subclass__" in vars(nn.Module):
        del nn.Module.__init_subclass__


def partitioned(deepspeed: Any, kind: str) -> Any:
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 1, "zero_optimization": {"stage": 3}}):
        return causal_model(kind)


@KINDS
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_of_zero_is_the_plain_one(kind: str, stage: int, deepspeed: Any) -> None:
    expected = after_step(causal_model(kind), 0.1)
    model = sparse_model(kind).train()
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        # the default clips to a norm of 1
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    engine.backward(engine(input_ids=token_ids(), labels=token_ids()).loss)
    engine.step()
    same_step(model, expected, causal_model(kind))


@KINDS
def test_partitioned_weights_are_refused_by_name(kind: str, deepspeed: Any) -> None:
    model = partitioned(deepspeed, kind)
    weight = {"llama": r"layers\.0\.mlp .*gate_proj", "opt": r"layers\.0 .*fc1"}[kind]
    message = (
        rf"{weight} must have a weight \[64, 32\] .*, got weight, .* \[0\].*ZeRO-3 has partitioned.* in a new process"
    )
    with pytest.raises(TypeError, match=message):
        twell_hf.sparsify(model)


def test_layers_run_dense_once_zero_init_has_replaced_linear(deepspeed: Any) -> None:
    expected, model = logits(causal_model("llama")), sparse_model("llama")
    assert strategies(model) == {"union"}
    partitioned(deepspeed, "llama")
    assert F.linear.__module__.startswith("deepspeed")
    torch.testing.assert_close(logits(model), expected)
    assert strategies(model) == {"dense"}
