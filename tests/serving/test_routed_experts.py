"""Routed experts of Nemotron-H through twell in vLLM: the tokens of transformers.

On a CPU vLLM has no experts without a gate, so there is no engine without twell to compare with.
"""

from pathlib import Path
from typing import Any

import pytest
from conftest import PROMPTS
from served import HEADS, LAYERS, ON_GPU, ROW, TWO_RANKS, Serve, Served, assert_alike, checkpoint, greedy, needs_gpus

SIZES = {
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 192,
    "moe_shared_expert_intermediate_size": 256,
}
EXPERTS = {"experts": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("experts"), "relu2", kind="NemotronH", sizes=SIZES)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return greedy(model, PROMPTS, stock=True)


@pytest.mark.parametrize("strategy", ["row", "dense", "union"])
def test_same_tokens(strategy: str, model: Path, serve: Serve, expected: list[list[int]]) -> None:
    served = serve(model, hf_overrides={"sparsity_strategy": strategy}, request=EXPERTS)
    assert served.tokens == expected
    assert served.model == "NemotronHForCausalLM"
    assert len(served.experts) == LAYERS
    assert served.experts_rows == [True] * LAYERS
    # shared experts
    assert len(served.layers) == LAYERS
    said = {"union": "auto"}.get(strategy, strategy)
    assert f'{LAYERS} layers of experts run through torch.ops.twell.experts: strategy "{said}"' in served.log


def test_compiled(model: Path, serve: Serve, expected: list[list[int]]) -> None:
    served = serve(model, enforce_eager=False, hf_overrides=ROW, request=EXPERTS)
    assert served.tokens == expected
    assert len(served.experts) == LAYERS


@pytest.mark.parametrize("by_expert", [False, True], ids=["tensor", "expert"])
def test_parallel(by_expert: bool, model: Path, serve: Serve, expected: list[list[int]]) -> None:
    ranks = TWO_RANKS | {"enable_expert_parallel": by_expert}
    served = serve(model, hf_overrides=ROW, request=EXPERTS, **ranks)
    assert served.tokens == expected
    assert len(served.experts) == LAYERS


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> tuple[Path, Served]:
    """A model whose heads suit a GPU, and what vLLM makes of it there without twell."""
    sizes = SIZES | HEADS | {"head_dim": 128}
    model = checkpoint(tmp_path_factory.mktemp("on_gpu"), "relu2", kind="NemotronH", sizes=sizes)
    return model, serve(model, plugin=False, **ON_GPU)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("eager", "ranks"),
    [(True, {}), (False, TWO_RANKS), (False, TWO_RANKS | {"enable_expert_parallel": True})],
    ids=["eager", "tensor", "expert"],
)
def test_on_gpus(eager: bool, ranks: dict[str, Any], on_gpu: tuple[Path, Served], serve: Serve) -> None:
    needs_gpus(2 if ranks else 1)
    model, stock = on_gpu
    served = serve(model, enforce_eager=eager, hf_overrides=ROW, **ON_GPU, **ranks)
    assert_alike(served, stock)
    assert served.experts_rows == [True] * LAYERS
    assert len(served.layers) == LAYERS


def test_latent_experts_of_groups(tmp_path: Path, serve: Serve) -> None:
    more = {"moe_latent_size": 64, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    model = checkpoint(tmp_path, "relu2", kind="NemotronH", sizes=SIZES | more)
    served = serve(model, hf_overrides=ROW, request=EXPERTS)
    assert served.tokens == greedy(model, PROMPTS, stock=True)
    assert len(served.experts) == LAYERS
