"""twell's plug-in in vLLM's engine: the same tokens as without it, and other models untouched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from served import Serve, checkpoint

LAYERS = 2
ROW = {"sparsity_strategy": "row"}
# The paper's checkpoints have a model type of their own or Llama's, and name an activation that they do not apply.
PAPERS = {"architectures": ["SparseLlamaForCausalLM"], "hidden_act": "silu", "sparsity_gated_mlp": True}


def test_without_the_plugin_a_relu_model_is_refused(relu: Path, run: Any) -> None:
    refused = run(relu, plugin=False)
    assert refused.returncode != 0
    assert "Only silu is supported" in refused.stdout + refused.stderr


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_relu_llama_has_the_same_tokens(eager: bool, relu: Path, serve: Serve, expected: list[list[int]]) -> None:
    served = serve(relu, enforce_eager=eager, hf_overrides=ROW)
    assert served.tokens == expected
    assert served.model == "SparseForCausalLM"
    assert served.layers == ["ServedMLP"] * LAYERS
    assert served.rows == [True] * LAYERS
    assert f"twell: {LAYERS} feed-forward layers run through torch.ops.twell.ffn" in served.log


@pytest.mark.parametrize(("model_type", "rows"), [("llama", False), ("llama_sparse_relu", True)])
def test_papers_checkpoint_is_served_with_relu(
    model_type: str, rows: bool, tmp_path: Path, serve: Serve, expected: list[list[int]]
) -> None:
    model = checkpoint(tmp_path, "silu", rows, model_type=model_type, **PAPERS)
    served = serve(model, hf_overrides=ROW)
    assert served.tokens == expected
    assert served.layers == ["ServedMLP"] * LAYERS
    assert "the configuration says 'silu', which is ignored" in served.log


def test_qwen2_has_the_same_tokens(tmp_path: Path, serve: Serve) -> None:
    model = checkpoint(tmp_path / "stock", "relu", kind="Qwen2")
    # as twell.integrations.transformers saves it
    own = {"architectures": ["SparseQwen2ForCausalLM"], "model_type": "sparse_qwen2", "sparsity_strategy": "row"}
    sparse = checkpoint(tmp_path / "sparse", "relu", kind="Qwen2", **own)
    stock = serve(model, plugin=False, model_impl="transformers")
    for served in (serve(model, hf_overrides=ROW), serve(sparse)):
        assert served.tokens == stock.tokens
        assert served.layers == ["ServedMLP"] * LAYERS


def test_silu_model_is_untouched(tmp_path: Path, serve: Serve) -> None:
    model = checkpoint(tmp_path, "silu")
    stock, served = serve(model, plugin=False), serve(model)
    assert served.tokens == stock.tokens
    assert (served.model, served.layers) == (stock.model, stock.layers) == ("LlamaForCausalLM", ["LlamaMLP"] * LAYERS)
    assert "twell:" not in served.log


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enable_lora": True}, "LoRA is enabled"),
        ({"dtype": "float32"}, "weights must be bfloat16 or float16, got torch.float32"),
    ],
    ids=["lora", "float32"],
)
def test_what_runs_as_without_twell_says_why(options: dict[str, Any], reason: str, relu: Path, serve: Serve) -> None:
    stock = serve(relu, plugin=False, model_impl="transformers", **options)
    served = serve(relu, **options)
    assert served.tokens == stock.tokens
    assert served.layers == stock.layers
    assert f"twell: {LAYERS} feed-forward layers run as without twell: {reason}" in served.log


def test_odd_sizes_run_as_without_twell(tmp_path: Path, serve: Serve) -> None:
    model = checkpoint(tmp_path, "relu", sizes={"intermediate_size": 700})
    stock, served = serve(model, plugin=False, model_impl="transformers"), serve(model)
    assert served.tokens == stock.tokens
    assert served.layers == stock.layers
    assert "N must be a positive multiple of 8 for the sparse kernels, got 700" in served.log


def test_tensor_parallel(relu: Path, serve: Serve, expected: list[list[int]]) -> None:
    served = serve(relu, tensor_parallel_size=2, distributed_executor_backend="mp", hf_overrides=ROW)
    assert served.tokens == expected
    assert served.layers == ["ServedMLP"] * LAYERS


def test_damaged_checkpoint_is_refused(tmp_path: Path, run: Any) -> None:
    from safetensors.torch import load_file, save_file

    model = checkpoint(tmp_path, "silu", **PAPERS)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] = weights["model.layers.1.mlp.down_proj.weight"][:, :-8].contiguous()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    refused = run(model)
    assert refused.returncode != 0
    expected = "layers.1.mlp.down_proj.weight: the down weight must be [256, 704] (linear) or [704, 256] (rows)"
    assert expected in refused.stdout + refused.stderr
