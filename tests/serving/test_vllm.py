"""twell's plug-in in vLLM's engine: the same tokens as without it, and other models untouched."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import PROMPTS
from served import COUNTED, LAYERS, ROW, Serve, assert_alike, checkpoint, counted, greedy, in_float8
from test_routed_experts import EXPERTS
from test_routed_experts import SIZES as EXPERT_SIZES

AS_WITHOUT = "feed-forward layers run as without twell:"
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
    assert len(served.layers) == LAYERS
    assert served.rows == [True] * LAYERS
    assert f'twell: {LAYERS} feed-forward layers run through torch.ops.twell.ffn: strategy "row"' in served.log


@pytest.mark.parametrize(
    ("by", "kind", "form", "options"),
    [
        ("load_weights", "Llama", "", {"dtype": "float16"}),
        ("reload_weights", "Llama", "", {"enforce_eager": False}),
        ("reload_weights", "Llama", "channel", {}),
        ("reload_weights", "Llama", "fp8-static", {}),
        ("reload_weights", "NemotronH", "", {"request": EXPERTS}),
        ("reload_weights", "NemotronH", "channel", {"request": EXPERTS}),
    ],
    ids=str,
)
def test_a_second_checkpoint_has_its_tokens(
    by: str, kind: str, form: str, options: dict[str, Any], tmp_path: Path, serve: Serve
) -> None:
    """As a trainer of reinforcement learning loads them, again and again: weights stay where graphs read them."""
    models, activation, sizes = [], "relu" if kind == "Llama" else "relu2", {} if kind == "Llama" else EXPERT_SIZES
    for seed in range(2):
        # their layers differ alone: on a CPU vLLM's convolutions keep what they had first
        models.append(checkpoint(tmp_path / str(seed), activation, kind=kind, sizes=sizes, other_layers=seed))
        if form:
            in_float8(models[-1], form)
    options = {"dtype": "bfloat16", "hf_overrides": ROW, "request": {}} | options
    first, second = (serve(model, **options) for model in models)
    served = serve(models[0], **options | {"request": options["request"] | {"then": str(models[1]), "by": by}})
    assert served.tokens == second.tokens != first.tokens
    assert served.rows == [True] * LAYERS
    assert served.experts_rows == first.experts_rows == [True] * len(first.experts)


@pytest.mark.parametrize(("model_type", "rows"), [("llama", False), ("llama_sparse_relu", True)])
def test_papers_checkpoint_is_served_with_relu(
    model_type: str, rows: bool, tmp_path: Path, serve: Serve, expected: list[list[int]]
) -> None:
    model = checkpoint(tmp_path, "silu", rows, model_type=model_type, **PAPERS)
    served = serve(model, hf_overrides=ROW)
    assert served.tokens == expected
    assert len(served.layers) == LAYERS
    assert "the configuration says 'silu', which is ignored" in served.log


def test_qwen2_has_the_same_tokens(tmp_path: Path, serve: Serve) -> None:
    model = checkpoint(tmp_path / "stock", "relu", kind="Qwen2")
    # as twell.integrations.transformers saves it
    own = {"architectures": ["SparseQwen2ForCausalLM"], "model_type": "sparse_qwen2", "sparsity_strategy": "row"}
    sparse = checkpoint(tmp_path / "sparse", "relu", kind="Qwen2", **own)
    stock = serve(model, plugin=False, model_impl="transformers")
    for served in (serve(model, hf_overrides=ROW), serve(sparse)):
        assert served.tokens == stock.tokens
        assert len(served.layers) == LAYERS


@pytest.mark.parametrize("kind", ["Llama", "Gemma"])
def test_squared_relu_has_the_same_tokens(kind: str, tmp_path: Path, serve: Serve) -> None:
    model = checkpoint(tmp_path, "relu2", kind=kind)
    stock = serve(model, plugin=False, model_impl="transformers")
    served = serve(model, hf_overrides=ROW)
    assert served.tokens == stock.tokens
    assert len(served.layers) == LAYERS


FATRELU = {"hidden_act": "fatrelu", "hidden_act_param": 0.5}


@pytest.mark.parametrize(
    ("own", "eager"), [(FATRELU, True), (FATRELU, False), ({"hidden_act": "drelu"}, True)], ids=str
)
def test_activations_that_no_stock_class_has(
    own: dict[str, Any], eager: bool, tmp_path: Path, serve: Serve, expected: list[list[int]]
) -> None:
    model = checkpoint(tmp_path, "relu", **own)
    served = serve(model, hf_overrides=ROW)
    assert served.tokens == greedy(model, PROMPTS) != expected
    if not eager:
        # compiled code rounds otherwise
        compiled = serve(model, enforce_eager=False, hf_overrides=ROW)
        assert_alike(compiled, served)
        served = compiled
    assert len(served.layers) == LAYERS


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"dtype": "float32"}, "weights must be bfloat16 or float16, got torch.float32"),
        ({"hf_overrides": {"hidden_act_param": None}}, 'a configuration with "fatrelu" must have its threshold'),
    ],
)
def test_activations_that_no_stock_class_has_never_run_without_twell(
    options: dict[str, Any], got: str, tmp_path: Path, run: Any
) -> None:
    refused = run(checkpoint(tmp_path, "relu", **FATRELU), **options)
    assert refused.returncode != 0
    assert got in refused.stdout + refused.stderr


@pytest.mark.parametrize(
    ("kind", "activation", "form", "options", "reason"),
    [
        ("Llama", "silu", "", {}, ""),
        ("Starcoder2", "gelu_pytorch_tanh", "", {}, ""),
        ("OPT", "relu", "", {"model_impl": "vllm"}, ""),
        ("OPT", "relu", "", {"enable_lora": True}, "LoRA is enabled"),
        ("Llama", "relu", "", {"enable_lora": True}, "LoRA is enabled"),
        ("Llama", "relu", "", {"dtype": "float32"}, "weights must be bfloat16 or float16, got torch.float32"),
        ("Nemotron", "relu2", "", {"dtype": "float32"}, "weights must be bfloat16 or float16, got torch.float32"),
        ("Llama", "relu", "", {"request": {"broken": True}}, "its kernels cannot be loaded"),
        ("Llama", "relu", "channel", {}, "the model must be in bfloat16 with weights in e4m3, got torch.float16"),
        (
            "Llama",
            "relu",
            "odd",
            {},
            "sizes of a rank: N must be a positive multiple of 8 for the sparse kernels, got 700",
        ),
    ],
)
def test_what_runs_as_without_twell_and_why(
    kind: str, activation: str, form: str, options: dict[str, Any], reason: str, tmp_path: Path, serve: Serve
) -> None:
    model = checkpoint(tmp_path, activation, kind=kind, sizes={"intermediate_size": 700} if form == "odd" else None)
    if form == "channel":
        in_float8(model, form)
    # vLLM's own Llama refuses ReLU
    backend = {"model_impl": "transformers"} if (kind, activation) == ("Llama", "relu") else {}
    stock, served = serve(model, plugin=False, **options | backend), serve(model, **options)
    assert served.tokens == stock.tokens
    assert served.layers == stock.layers == []
    said = [line for line in served.log.splitlines() if "twell:" in line]
    assert len(said) == bool(reason)
    assert all(f"{LAYERS} {AS_WITHOUT} {reason}" in line for line in said)
    assert reason or served.model == stock.model


def test_prefixes_in_the_cache_change_no_token(relu: Path, serve: Serve, expected: list[list[int]]) -> None:
    served = serve(relu, hf_overrides=ROW, enable_prefix_caching=True, block_size=32, request={"repeat": 2})
    assert served.tokens == expected
    # of 200 tokens all whole blocks
    assert served.cached == [0, 192, 0]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_auto_learns_from_requests_alone(eager: bool, relu: Path, serve: Serve, expected: list[list[int]]) -> None:
    figures = [[3.5, 0.1, 0.2], [40.25, 0.5, 0.6]]
    options = {"hf_overrides": {"sparsity_figures": figures}, "request": {"chooses": True}}
    served = serve(relu, enforce_eager=eager, **options)
    assert served.tokens == expected
    assert served.strategies == ["auto"] * LAYERS
    assert served.started == [[]] * LAYERS
    assert counted(served) == COUNTED
    # few tokens take one pass, which asks for no figures
    assert all(row[2] is None for layer in served.choices for row in layer[:-1])
    assert all(layer[-1][2] not in (None, 3.5, 40.25) for layer in served.choices)
    # what it knew before, for many and for few tokens
    assert served.known == [[[256, [3.5, 0.2]], [8192, [3.5, 0.1]]], [[256, [40.25, 0.6]], [8192, [40.25, 0.5]]]]


def test_batch_invariant_mode_gives_a_token_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own mode needs a GPU."""
    import vllm.envs

    from twell.integrations import _vllm_model

    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert _vllm_model.route_of(SimpleNamespace()).name == "row+invariant"
    assert _vllm_model.route_of(SimpleNamespace(sparsity_strategy="dense")).name == "dense"
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", False)
    for settings, name in (
        ({}, "auto"),
        ({"sparsity_strategy": "union"}, "union"),
        ({"sparsity_invariant": True}, "row+invariant"),
    ):
        assert _vllm_model.route_of(SimpleNamespace(**settings)).name == name
    assert [_vllm_model.route_of(SimpleNamespace(sparsity_screen=s)).screen for s in ("auto", "off")] == [True, False]


def test_layers_run_as_without_twell_for_a_reason() -> None:
    """Most layers need more than a CPU, so the question is asked of layers that are made by hand."""
    import torch
    from torch import nn
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        RowParallelLinear,
        UnquantizedLinearMethod,
    )

    from twell.base.activation import RELU
    from twell.integrations._vllm_model import FFN, why_not

    def linear(kind: type[nn.Module], shape: tuple[int, int], **options: Any) -> Any:
        made: Any = kind.__new__(kind)
        nn.Module.__init__(made)
        made.quant_method, made.weight = (
            UnquantizedLinearMethod(),
            nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)),
        )
        for name, value in options.items():
            setattr(made, name, value)
        return made

    def reason(first: nn.Module | None, down: nn.Module | None, gated: bool = False) -> str:
        layer = nn.Module()
        layer.first, layer.down = first, down
        ffn = FFN("" if gated else "first", "act", "down", RELU)
        device = SimpleNamespace(device=torch.device("cpu"))
        return why_not(layer, ffn, SimpleNamespace(lora_config=None, device_config=device))

    column, row = ColumnParallelLinear, RowParallelLinear
    assert reason(linear(MergedColumnParallelLinear, (192, 64)), linear(row, (64, 96)), gated=True) == ""
    assert reason(linear(column, (96, 64)), linear(row, (64, 96))) == ""
    assert reason(linear(column, (96, 64)), linear(row, (64, 96)), gated=True) == (
        "vLLM must have made one MergedColumnParallelLinear of a layer, got 0"
    )
    assert reason(nn.Linear(64, 96), linear(row, (64, 96))) == "projections must be linear layers of vLLM, got Linear"
    whole = "each rank must keep its neurons from the first projection to the last, got those of all ranks"
    assert reason(linear(column, (96, 64), gather_output=True), linear(row, (64, 96))) == whole
    assert reason(linear(column, (96, 64)), linear(row, (64, 96), input_is_parallel=False)) == whole
    assert reason(linear(column, (96, 64)), linear(row, (32, 96))) == (
        "the first weight must be [96, 32] with a last one of [32, 96], got [96, 64]"
    )


def test_tensor_parallel(relu: Path, serve: Serve, expected: list[list[int]]) -> None:
    served = serve(relu, tensor_parallel_size=2, distributed_executor_backend="mp", hf_overrides=ROW)
    assert served.tokens == expected
    assert len(served.layers) == LAYERS
