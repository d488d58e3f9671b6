"""Layers without a gate through twell in vLLM: the tokens of vLLM without the plug-in."""

from pathlib import Path

import pytest
from conftest import PROMPTS
from served import COUNTED, LAYERS, ROW, TWO_RANKS, Serve, assert_alike, checkpoint, counted, greedy

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
