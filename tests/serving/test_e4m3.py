"""Feed-forward layers in e4m3 through twell in vLLM: the engine's tokens, of each format of checkpoints."""

from pathlib import Path

import pytest
from served import (
    COUNTED,
    DENSE,
    HEADS,
    LAYERS,
    ON_GPU,
    ROW,
    TWO_RANKS,
    Serve,
    assert_alike,
    checkpoint,
    counted,
    in_float8,
)
from test_routed_experts import EXPERTS, SIZES

THROUGH = f"twell: {LAYERS} feed-forward layers of e4m3 weights run through torch.ops.twell.ffn"


def model_of(tmp_path: Path, form: str, kind: str = "Llama") -> Path:
    model = checkpoint(tmp_path / "model", "relu" if kind == "Llama" else "relu2", kind=kind)
    in_float8(model, form)
    return model


@pytest.mark.parametrize(("form", "kind"), [("channel", "Llama"), ("modelopt-channel", "Nemotron")])
def test_dense_has_the_tokens_of_vllm(form: str, kind: str, tmp_path: Path, serve: Serve) -> None:
    """Its dense layers quantise h by token as twell's do, if weights have scales by rows."""
    model = model_of(tmp_path, form, kind)
    stock = serve(model, plugin=False, dtype="bfloat16", model_impl="auto" if kind == "Nemotron" else "transformers")
    served = serve(model, dtype="bfloat16", hf_overrides=DENSE)
    assert served.tokens == stock.tokens
    assert stock.layers == []
    assert served.rows == [True] * LAYERS
    assert f'{THROUGH}: strategy "dense"' in served.log


def test_formats_of_the_same_values_have_the_same_tokens(tmp_path: Path, serve: Serve) -> None:
    made = []
    for form in ("tensor", "fp8-static", "modelopt"):
        served = serve(model_of(tmp_path / form, form), dtype="bfloat16", hf_overrides=ROW)
        assert served.rows == [True] * LAYERS
        assert f'{THROUGH}: strategy "row"' in served.log
        made.append(served.tokens)
    assert made[0] == made[1] == made[2]


def test_compiled_and_counted_by_auto(tmp_path: Path, serve: Serve) -> None:
    model = model_of(tmp_path, "fp8")
    served = serve(model, dtype="bfloat16", enforce_eager=False, request={"chooses": True})
    assert len(served.layers) == LAYERS
    assert served.started == [[]] * LAYERS
    assert counted(served) == COUNTED


def test_tensor_parallel(tmp_path: Path, serve: Serve) -> None:
    model = model_of(tmp_path, "tensor")
    alone = serve(model, dtype="bfloat16", hf_overrides=ROW)
    served = serve(model, dtype="bfloat16", hf_overrides=ROW, **TWO_RANKS)
    assert_alike(served, alone)
    assert served.rows == [True] * LAYERS


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_on_a_gpu(eager: bool, tmp_path: Path, serve: Serve) -> None:
    model = checkpoint(tmp_path, "relu", sizes=HEADS)
    in_float8(model, "channel")
    options = ON_GPU | {"enforce_eager": eager}
    stock = serve(model, plugin=False, model_impl="transformers", **options)
    for strategy in ("row", "auto"):
        served = serve(model, hf_overrides={"sparsity_strategy": strategy}, **options)
        assert_alike(served, stock)
        assert served.rows == [True] * LAYERS
        assert f'{THROUGH}: strategy "{strategy}"' in served.log


def test_experts_of_the_same_values_have_the_same_tokens(tmp_path: Path, serve: Serve) -> None:
    """Each format has a quant method and loaders of its own in vLLM, and shared experts in e4m3 beside."""
    made = []
    for form in ("modelopt", "fp8-static"):
        model = checkpoint(tmp_path / form, "relu2", kind="NemotronH", sizes=SIZES)
        in_float8(model, form)
        served = serve(model, dtype="bfloat16", hf_overrides=ROW, request=EXPERTS)
        assert served.experts_rows == [True] * LAYERS
        through = 'run through torch.ops.twell.experts: strategy "row"'
        assert f"{LAYERS} layers of experts of e4m3 weights {through}" in served.log
        assert f"{THROUGH}:" in served.log
        made.append(served.tokens)
    assert made[0] == made[1]
