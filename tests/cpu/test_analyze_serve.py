"""``twell analyze --serve``: figures and where they come from, files as a server takes them, bad input."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import saved_models
from safetensors.torch import load_file, save_file

from twell.choose import rates
from twell.commands import analyze, cli
from twell.commands.request import RequestError
from twell.float8 import quantize
from twell.integrations.layouts import measured

SIZES = ["--prefill", "2048", "--decode", "1", "64"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    saved_models.save(folder)
    (folder / "text.txt").write_text(saved_models.text(1500))
    return folder


@pytest.fixture
def llama(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def check(capsys: Any, *words: object) -> str:
    """What the command prints, or why it refuses, a line."""
    try:
        saved_models.run(analyze, "--serve", *words)
    except RequestError as error:
        return str(error)
    printed: str = capsys.readouterr().out
    return printed


def configure(folder: Path, **content: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | content))


def store_rows(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights = {name: t.T.contiguous() if "down_proj" in name else t for name, t in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def firings(folder: Path, activation: str = "relu", hidden_act_param: float = 0.0) -> list[torch.Tensor]:
    """Which neurons of each layer fire for 8 sequences of 256 tokens, by the stock model with another activation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    config = LlamaConfig.from_pretrained(folder, hidden_act="relu")
    model = AutoModelForCausalLM.from_pretrained(folder, config=config)
    ids = AutoTokenizer.from_pretrained(folder)((folder / "text.txt").read_text())["input_ids"]
    bos, rows = ids[0], []
    while len(rows) < 8:
        start = 0 if not rows else 1 + 255 * len(rows)
        rows.append([bos, *ids[start + (not rows) : start + 255 + (not rows)]])
    gates: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda _, __, gate: gates.append(gate > hidden_act_param))
        layer.mlp.act_fn = torch.nn.Threshold(hidden_act_param, 0.0)
        if activation == "drelu":
            layer.mlp.up_proj.register_forward_hook(lambda _, __, up: up.relu())
    with torch.no_grad():
        model(torch.tensor(rows))
    return [fired.flatten(0, 1) for fired in gates]


def test_without_text_figures_are_assumed_and_said_to_be(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = check(capsys, llama, *SIZES, "--json", llama / "out.json")
    assert "Figures: assumed, 1.7 non-zeros per token, one of 190 neurons" in out
    data = json.loads((llama / "out.json").read_text())
    kinds = [("decoding", 1), ("decoding", 64), ("prefill", 2048)]
    assert [(r["layer"], r["call"], r["tokens"]) for r in data["rows"]] == [
        (i, *kind) for i in range(3) for kind in kinds
    ]
    for row in data["rows"]:
        problem = rates.Problem(row["tokens"], 64, 320, True, False, merged=row["tokens"] <= 512)
        known = rates.Figures(320 / 190, 1 - (1 - 1 / 190) ** 128)
        assert row["seconds"] == pytest.approx(rates.seconds(problem, known), rel=0.02)
        assert row["route"] == rates.decide(problem, known).strategy
        assert row["ratio"] == row["seconds"][row["route"]] / row["seconds"]["dense"]
    assert "assumed, 320.0 non-zeros per token, tokens" in check(capsys, llama, *SIZES, "--nnz", 320)
    # of a rank, with half of the neurons
    check(capsys, llama, *SIZES, "--json", llama / "two.json", "--ranks", 2)
    row = json.loads((llama / "two.json").read_text())["rows"][0]
    problem, known = problem._replace(m=1, n=160, merged=True), known._replace(nonzeros=320 / 380)
    assert row["seconds"] == pytest.approx(rates.seconds(problem, known), rel=0.02)


def test_serve_check_is_another_name(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve-check", str(llama), *SIZES]) == 0
    printed = capsys.readouterr()
    assert printed.out == check(capsys, llama, *SIZES)
    assert printed.err == "twell serve-check is `twell analyze --serve`\n"


def test_measured_figures_are_those_of_the_gates(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = check(capsys, llama, *SIZES, "--text", llama / "text.txt", "--save", "--tokens", 2048)
    assert "Figures: measured on 2,048 tokens of 1 file, 8 sequences of up to 256" in out
    found = measured(json.loads((llama / "config.json").read_text()), 3)
    assert found is not None
    for fired, of in zip(firings(llama), found, strict=True):
        assert of.nonzeros == pytest.approx(fired.sum().item() / len(fired), abs=0.01)
        assert of.text == pytest.approx(fired.view(-1, 128, 320).any(1).float().mean().item(), abs=1e-4)
        # more neurons fire on tokens of several texts, and no more than by chance
        assert of.text - 0.02 <= of.batch <= 1 - (1 - of.nonzeros / 320) ** 128
    out = check(capsys, llama, *SIZES)
    assert "Figures: measured earlier, sparsity_figures of the configuration" in out
    assert f"{found[0].nonzeros:,.1f}" in out


@pytest.mark.parametrize(("model_type", "rows"), [("llama_sparse_relu", True), ("sparse_llama", False)])
def test_sparse_checkpoint_that_lies_is_measured_with_relu(
    model_type: str, rows: bool, saved: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SIZES, "--text", saved / "text.txt", "--tokens", 2048, "--batch", 4]
    out = check(capsys, saved, *words)
    configure(llama, architectures=["SparseLlamaForCausalLM"], hidden_act="silu", model_type=model_type)
    if rows:
        store_rows(llama)
    before = json.loads((llama / "config.json").read_text())
    sparse = check(capsys, llama, *words, "--save")
    assert "its configuration says 'silu', which is ignored" in sparse
    figures = "Figures: measured on 2,048 tokens"
    shown = sparse[sparse.index(figures) : sparse.index("Figures written")].rstrip()
    assert out[out.index(figures) :].startswith(shown)
    written = json.loads((llama / "config.json").read_text())
    assert len(written.pop("sparsity_figures")) == 3
    # what a server knows it by stays
    assert written == before


@pytest.mark.parametrize(
    ("activation", "name", "architecture"),
    [
        ("fatrelu", "FATReLU", "SparseLlamaForCausalLM"),
        ("drelu", "dReLU", "LlamaForCausalLM"),
        ("relu2", "squared ReLU", "SparseLlamaForCausalLM"),
        ("relu2", "squared ReLU", "LlamaForCausalLM"),
    ],
)
def test_the_family_is_served_and_measured(
    activation: str, name: str, architecture: str, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threshold = {"hidden_act_param": 0.05} if activation == "fatrelu" else {}
    configure(llama, hidden_act=activation, architectures=[architecture], **threshold)
    if activation != "relu2":
        # a key of the paper's code, as its checkpoints have it
        configure(llama, sparsity_gated_mlp=True)
    words = [*SIZES, "--text", llama / "text.txt", "--save", "--tokens", 2048]
    out = check(capsys, llama, *words)
    assert f"vLLM serves {architecture} with {name}, through twell" in out
    # saved figures do not change how a model is read
    assert check(capsys, llama, *words) == out
    found = measured(json.loads((llama / "config.json").read_text()), 3)
    assert found is not None
    if activation != "relu2":
        for fired, of in zip(firings(llama, activation, **threshold), found, strict=True):
            assert of.nonzeros == pytest.approx(fired.sum().item() / len(fired), abs=0.01)


def test_odd_sizes_are_said_to_run_without_twell(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(llama, num_attention_heads=80)
    out = check(capsys, llama, *SIZES, "--ranks", 80)
    assert "vLLM serves LlamaForCausalLM with ReLU\n" in out
    assert "3 of 3 layers run as without twell: sizes of a rank: N must be a positive multiple of 8" in out


def test_broken_json_is_refused(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(llama, sparsity_figures=[[1, 0.5, 0.5]] * 2 + [[10**400, 0.5, 0.5]])
    assert "must have [non-zeros, share, share]" in check(capsys, llama)
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text('{"weight_map": {"model.layers.0.mlp.up_proj.weight": 3}}')
    err = check(capsys, llama)
    assert 'must have a "weight_map" of tensor names to files, got' in err
    (llama / "config.json").write_text('{"a": ' + "[" * 100_000)
    err = check(capsys, llama)
    assert "must be a JSON object" in err


def quantised(folder: Path, settings: dict[str, Any], granularity: Any = "row", layers: str = "") -> None:
    """Turn the FFNs to e4m3, and ``config.json`` to say so; ``layers``: a pattern of the names of those that are."""
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if ".mlp." in name and re.search(layers, name):
            record = quantize(weight, granularity)
            tensors |= {name: record.values, f"{name}_scale": record.scale}
        else:
            tensors[name] = weight.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    configure(folder, quantization_config=settings, dtype="bfloat16")


CHANNEL = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}


def test_layers_in_e4m3_are_predicted(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised(llama, CHANNEL | {"ignore": ["model.layers.1.*"]})
    # the lists of a checkpoint and its files must agree
    assert "model.layers.1.mlp.gate_proj.weight must be BF16 or F16 or F32" in check(capsys, llama, *SIZES)
    configure(llama, quantization_config=None)
    (llama / "hf_quant_config.json").write_text(json.dumps({"quantization": CHANNEL}))
    out = check(capsys, llama, *SIZES)
    assert "vLLM serves LlamaForCausalLM with ReLU, through twell\n" in out
    assert "3 of 3 layers have weights in e4m3: so has their dense, which copies no weight" in out
    assert "by rates of NVIDIA H200" in out


@pytest.mark.parametrize(
    ("packed", "settings"), [("weight", {"quant_algo": "NVFP4"}), ("qweight", {"quant_method": "awq"})]
)
def test_other_formats_are_refused_with_what_to_do(
    packed: str, settings: dict[str, Any], llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(llama / "model.safetensors")
    for name in [name for name in tensors if ".mlp." in name]:
        tensors[name.replace("weight", packed)] = tensors.pop(name)[:, ::2].to(torch.uint8)
    save_file({name: t.contiguous() for name, t in tensors.items()}, llama / "model.safetensors")
    configure(llama, quantization_config=settings)
    err = check(capsys, llama)
    got = " ".join(next(iter(settings.items())))
    assert f"a scale by row, tensor or block of 128 x 128, got {got}: take a checkpoint in bfloat16 or in such" in err


@pytest.mark.parametrize(
    ("granularity", "settings", "dtype", "reason"),
    [
        ("block", {"quant_algo": "FP8_PB_WO"}, "bfloat16", "a scale for each row, or one in all, got scales of blocks"),
        ("row", CHANNEL, "float16", "the model must be in bfloat16 with weights in e4m3, got float16"),
    ],
)
def test_layers_in_e4m3_that_run_as_without_twell(
    granularity: str, settings: Any, dtype: str, reason: str, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised(llama, settings, granularity)
    configure(llama, dtype=dtype)
    out = check(capsys, llama, *SIZES)
    assert "vLLM serves LlamaForCausalLM with ReLU\n" in out
    assert "3 of 3 layers run as without twell: " in out
    assert reason in out


def test_some_layers_may_stay_in_16_bits(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised(llama, CHANNEL | {"ignore": ["model.layers.1.*", "model.layers.2.*"]}, layers="layers.0.")
    out = check(capsys, llama, *SIZES)
    assert "1 of 3 layers have weights in e4m3" in out


def test_projections_of_a_layer_are_quantised_alike(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised(llama, CHANNEL | {"ignore": ["*.gate_proj"]}, layers="up_proj|down_proj")
    said = "model.layers.0.mlp.up_proj must be quantised as the projections beside it, which vLLM merges, got scales by"
    assert f"{said} row and by none" in check(capsys, llama, *SIZES)


def test_figures_are_not_written_through_a_link(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Revisions in a download cache share files, and those of the others changed, too."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in llama.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = (llama / "config.json").read_text()
    err = check(capsys, snapshot, "--text", llama / "text.txt", "--tokens", 600, "--save")
    assert "--save: expected a config.json of the folder's own, got a link to" in err
    assert (llama / "config.json").read_text() == before


def without(part: str) -> Any:
    return lambda weights: {name: weight for name, weight in weights.items() if part not in name}


def as_dtype(part: str, dtype: torch.dtype) -> Any:
    return lambda weights: {name: weight.to(dtype) if part in name else weight for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("1.mlp.gate_proj"), "model.layers.1.mlp.gate_proj.weight must be a matrix of at least one row and"),
        (
            without("1.mlp.down_proj"),
            "1.mlp.down_proj.weight must be a matrix of at least one row and column, got none",
        ),
        (without("layers.2."), "num_hidden_layers = 3, got 2 layers from 0 to 1"),
        (without("layers.0."), "num_hidden_layers = 3, got 2 layers from 1 to 2"),
        (
            lambda weights: weights | {f"tower.{name}": w.clone() for name, w in weights.items() if ".mlp." in name},
            "a number of its own, got model.layers.0.mlp and tower.model.layers.0.mlp",
        ),
        (
            lambda weights: {
                name: w[:, :0] if "down_proj" in name else w[:0] if "mlp" in name else w for name, w in weights.items()
            },
            "of at least one row and column, got [0, 64]",
        ),
        (as_dtype("up_proj", torch.int8), "must be BF16 or F16 or F32 for vLLM to serve it through twell, got I8"),
        (as_dtype("down_proj", torch.float8_e4m3fn), "for vLLM to serve it through twell, got F8_E4M3"),
        (
            lambda weights: {name: w[:, :-8] if "1.mlp.down" in name else w for name, w in weights.items()},
            "down_proj.weight: the down weight must be [64, 320] (linear) or [320, 64] (rows), got [64, 312]",
        ),
        (
            lambda weights: {name: w.T if "down_proj" in name else w for name, w in weights.items()},
            "vLLM reads down weights [hidden, intermediate]",
        ),
    ],
)
def test_files_that_no_server_would_take_are_refused(
    change: Any, message: str, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = change(load_file(llama / "model.safetensors"))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, llama / "model.safetensors")
    err = check(capsys, llama)
    assert message in err


def test_weights_of_32_bits_are_said_to_become_16(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warning = "vLLM turns them to 16; with --dtype float32 they run as without twell"
    assert warning in check(capsys, llama, *SIZES)
    weights = {name: weight.bfloat16() for name, weight in load_file(llama / "model.safetensors").items()}
    save_file(weights, llama / "model.safetensors")
    out = check(capsys, llama, *SIZES)
    assert "vLLM serves LlamaForCausalLM with ReLU, through twell" in out
    assert warning not in out


@pytest.mark.parametrize(
    ("settings", "strategy", "said"),
    [
        ({"sparsity_strategy": "union"}, "union", '"union", sparsity_strategy of'),
        ({"sparsity_strategy": "dense"}, "dense", '"dense", sparsity_strategy of'),
        ({"sparsity_invariant": True}, "row", '"row" with sparsity_invariant of'),
    ],
)
def test_strategy_of_the_configuration_is_that_of_every_layer(
    settings: dict[str, Any], strategy: str, said: str, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(llama, **settings)
    out = check(capsys, llama, *SIZES, "--json", llama / "out.json")
    assert f"Strategy: {said} the configuration" in out
    written = json.loads((llama / "out.json").read_text())
    assert all(row["route"] == strategy for row in written["rows"])
