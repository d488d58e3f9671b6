"""Layers without a gate through twell in vLLM: the tokens of vLLM without the plug-in."""

from pathlib import Path
from typing import Any

import pytest
from conftest import PROMPTS
from served import COUNTED, LAYERS, ROW, SIZES, TWO_RANKS, Serve, assert_alike, checkpoint, counted, greedy

# Kind of model, activation, and its down projections.
MODELS = [
    ("Arcee", "relu2", "mlp.down_proj"),
    ("Jais2", "relu2", "mlp.down_proj"),
    ("Starcoder2", "relu", "mlp.c_proj"),
    ("Phi", "relu", "mlp.fc2"),
    ("GPTNeoX", "relu", "mlp.dense_4h_to_h"),
    ("Nemotron", "relu2", "mlp.down_proj"),
    ("NemotronH", "relu2", "mixer.down_proj"),
    ("OPT", "relu", "fc2"),
]
BACKEND = "TransformersForCausalLM"


@pytest.mark.parametrize(("kind", "activation", "down"), MODELS, ids=[kind for kind, *_ in MODELS])
def test_same_tokens(kind: str, activation: str, down: str, tmp_path: Path, serve: Serve) -> None:
    model = checkpoint(tmp_path, activation, kind=kind)
    stock = serve(model, plugin=False)
    served = serve(model, hf_overrides=ROW)
    assert served.tokens == stock.tokens
    assert served.model == ("SparseForCausalLM" if stock.model == BACKEND else f"{kind}ForCausalLM")
    assert stock.layers == []
    assert [layer.partition("layers.")[2].partition(".")[2] for layer in served.layers] == [down] * LAYERS
    assert served.rows == [True] * LAYERS
    assert f"twell: {LAYERS} feed-forward layers run through torch.ops.twell.ffn" in served.log


@pytest.mark.parametrize("kind", ["Arcee", "Nemotron"])
def test_compiled_chosen_by_auto_and_tensor_parallel(kind: str, tmp_path: Path, serve: Serve) -> None:
    model = checkpoint(tmp_path, "relu2", kind=kind)
    # graphs of both are kept in one folder
    stock = serve(model, plugin=False, enforce_eager=False)
    served = serve(model, enforce_eager=False, request={"chooses": True})
    # few tokens add up in another order
    assert_alike(served, stock)
    # the operator ran, for requests
    assert counted(served) == COUNTED
    # compiled code may round otherwise than eager calls
    parallel = serve(model, hf_overrides=ROW, **TWO_RANKS)
    assert parallel.tokens == serve(model, plugin=False).tokens
    assert len(parallel.layers) == LAYERS


def test_fatrelu_without_a_gate(tmp_path: Path, serve: Serve) -> None:
    model = checkpoint(tmp_path, "relu", kind="Starcoder2", hidden_act="fatrelu", hidden_act_param=0.5)
    served = serve(model, hf_overrides=ROW)
    assert len(served.layers) == LAYERS
    assert served.tokens == greedy(model, PROMPTS)


def found(kind: str, activation: str = "relu", **config: Any) -> Any:
    """What twell finds in the first layer of a model of transformers before vLLM has made it its own."""
    import torch
    import transformers

    from twell.integrations._vllm_model import _of_transformers

    sizes = SIZES | {"hidden_act": activation, "pad_token_id": 0} | config
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(getattr(transformers, f"{kind}Config")(**sizes))
    layers = list(_of_transformers(model).values())
    assert len(set(layers)) <= 1
    return layers[0] if len(layers) == LAYERS else None


def test_what_counts_as_a_layer_of_the_transformers_backend() -> None:
    from twell.base.activation import RELU, Activation
    from twell.integrations._vllm_model import FFN

    assert found("Arcee", "relu2") == FFN("up_proj", "act_fn", "down_proj", Activation("relu2"))
    assert found("Olmo2") == FFN("", "act_fn", "down_proj", RELU)
    assert found("Olmo2", "silu") is None
    # a dropout, which only training has
    code = {"n_embd": 256, "n_inner": 704, "n_layer": LAYERS, "n_head": 4, "activation_function": "relu"}
    assert found("GPTBigCode", resid_pdrop=0.1, **code) == FFN("c_fc", "act", "c_proj", RELU)
    # others look like a layer
    assert found("Glm") == "GlmMLP has gate and up in one projection"
    assert found("FalconH1").startswith("FalconH1MLP cannot be run sparse: it must compute down_proj(act(gate_proj(x))")
    assert found("FalconH1").endswith("got another function of x: it runs mul")
