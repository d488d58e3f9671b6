"""``twell analyze --serve``: figures and where they come from, files as a server takes them, bad input."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import saved_models
from safetensors.torch import load_file, save_file

from twell.choose import rates
from twell.commands import analyze
from twell.commands.request import RequestError
from twell.integrations.layouts import measured
from twell.ops.float8 import quantize

SIZES = ["--prefill", "2048", "--decode", "1", "64"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved_models.save(tmp_path_factory.mktemp("llama"))
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


def rewrite(folder: Path, change: Callable[[str, Tensor], Tensor | dict[str, Tensor] | None]) -> None:
    """Weights are what ``change`` makes of their names and them: another one, some by name, or None for none."""
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        made = change(name, weight)
        tensors |= made if isinstance(made, dict) else {} if made is None else {name: made}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def firings(folder: Path, activation: str = "relu", hidden_act_param: float = 0.0) -> list[Tensor]:
    """Which neurons of each layer fire for 8 sequences of 256 tokens, by the stock model with another activation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    config = LlamaConfig.from_pretrained(folder, hidden_act="relu")
    model = AutoModelForCausalLM.from_pretrained(folder, config=config)
    ids = AutoTokenizer.from_pretrained(folder)((folder / "text.txt").read_text())["input_ids"]
    rows = [[ids[0], *ids[1 + 255 * i : 256 + 255 * i]] for i in range(8)]
    gates: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda _, __, gate: gates.append(gate > hidden_act_param))
        layer.mlp.act_fn = torch.nn.Threshold(hidden_act_param, 0.0)
        if activation == "drelu":
            layer.mlp.up_proj.register_forward_hook(lambda _, __, up: up.relu())
    with torch.no_grad():
        model(torch.tensor(rows))
    return [fired.flatten(0, 1) for fired in gates]


def test_without_text_figures_are_assumed_and_said_to_be(llama: Path, capsys: Any) -> None:
    out = check(capsys, llama, *SIZES, "--json", llama / "out.json")
    assert "Figures: assumed, 1.7 non-zeros per token, one of 190 neurons" in out
    data = json.loads((llama / "out.json").read_text())
    rows = [(i, *kind) for i in range(3) for kind in (("decoding", 1), ("decoding", 64), ("prefill", 2048))]
    assert [(row["layer"], row["call"], row["tokens"]) for row in data["rows"]] == rows
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


@pytest.mark.parametrize(
    ("activation", "name", "architecture"),
    [
        ("relu", "ReLU", "LlamaForCausalLM"),
        ("fatrelu", "FATReLU", "SparseLlamaForCausalLM"),
        ("drelu", "dReLU", "LlamaForCausalLM"),
        ("relu2", "squared ReLU", "SparseLlamaForCausalLM"),
        ("relu2", "squared ReLU", "LlamaForCausalLM"),
    ],
)
def test_the_family_is_served_and_measured(
    activation: str, name: str, architecture: str, llama: Path, capsys: Any
) -> None:
    threshold = {"hidden_act_param": 0.05} if activation == "fatrelu" else {}
    configure(llama, hidden_act=activation, architectures=[architecture], **threshold)
    if activation in ("fatrelu", "drelu"):
        # a key of the paper's code, as its checkpoints have it
        configure(llama, sparsity_gated_mlp=True)
    words = [*SIZES, "--text", llama / "text.txt", "--save", "--tokens", 2048]
    out = check(capsys, llama, *words)
    assert f"vLLM serves {architecture} with {name}, through twell" in out
    assert "Figures: measured on 2,048 tokens of 1 file, 8 sequences of up to 256" in out
    # saved figures do not change how a model is read
    assert check(capsys, llama, *words) == out
    found = measured(json.loads((llama / "config.json").read_text()), 3)
    assert found is not None
    if activation != "relu2":
        for fired, of in zip(firings(llama, activation, **threshold), found, strict=True):
            assert of.nonzeros == pytest.approx(fired.sum().item() / len(fired), abs=0.01)
            assert of.text == pytest.approx(fired.view(-1, 128, 320).any(1).float().mean().item(), abs=1e-4)
            # more neurons fire on tokens of several texts, and no more than by chance
            assert of.text - 0.02 <= of.batch <= 1 - (1 - of.nonzeros / 320) ** 128
    out = check(capsys, llama, *SIZES)
    assert "Figures: measured earlier, sparsity_figures of the configuration" in out
    assert f"{found[0].nonzeros:,.1f}" in out


@pytest.mark.parametrize(("model_type", "rows"), [("llama_sparse_relu", True), ("sparse_llama", False)])
def test_sparse_checkpoint_that_lies_is_measured_with_relu(
    model_type: str, rows: bool, saved: Path, llama: Path, capsys: Any
) -> None:
    words = [*SIZES, "--text", saved / "text.txt", "--tokens", 2048, "--batch", 4]
    out = check(capsys, saved, *words)
    configure(llama, architectures=["SparseLlamaForCausalLM"], hidden_act="silu", model_type=model_type)
    if rows:
        rewrite(llama, lambda name, weight: weight.T if "down_proj" in name else weight)
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


def quantised(settings: dict[str, Any], granularity: Any = "row", layers: str = "", dtype: str = "bfloat16") -> Any:
    """FFNs, or those whose names have a pattern, in e4m3, and a configuration that says so."""

    def change(name: str, weight: Tensor) -> Any:
        if ".mlp." not in name or not re.search(layers, name):
            return weight.bfloat16()
        record = quantize(weight, granularity)
        return {name: record.values, f"{name}_scale": record.scale}

    return change, {"quantization_config": settings, "dtype": dtype}


def ignoring(*names: str) -> dict[str, Any]:
    return CHANNEL | {"ignore": [*names]}


def packed(settings: dict[str, Any], name: str) -> Any:
    def change(key: str, weight: Tensor) -> Any:
        return {key.replace("weight", name): weight[:, ::2].to(torch.uint8)} if ".mlp." in key else weight

    return change, {"quantization_config": settings}


def without(part: str) -> Any:
    return lambda name, weight: None if part in name else weight


def by(part: str, change: Callable[[Tensor], Tensor]) -> Any:
    return lambda name, weight: change(weight) if part in name else weight


CHANNEL = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
WITHOUT = "3 of 3 layers run as without twell: "
SIXTEEN = "must be BF16 or F16 or F32, or F8_E4M3 with a scale, for vLLM to serve it"
MATRIX = "proj.weight must be a matrix of at least one row and column, got "
# how weights and configurations change, and what is said, in an error or not
FILES: dict[str, tuple[Any, str]] = {
    "as they are": (None, "vLLM turns them to 16; with --dtype float32 they run as without twell"),
    "in 16 bits": (lambda _, w: w.bfloat16(), "vLLM serves LlamaForCausalLM with ReLU, through twell\nFigures"),
    "in e4m3": (quantised(CHANNEL), "3 of 3 layers have weights in e4m3: so has their dense, which copies no weight"),
    "a part in e4m3": (quantised(ignoring("*.1.*", "*.2.*"), layers="layers.0."), "1 of 3 layers have weights in e4m3"),
    "a gate in 16 bits": (quantised(ignoring("*.gate_proj"), layers="up_proj|down_proj"), "scales by row and by none"),
    "scales of blocks": (quantised({"quant_algo": "FP8_PB_WO"}, "block"), f"{WITHOUT}weights in e4m3 must"),
    "e4m3 in float16": (quantised(CHANNEL, dtype="float16"), f"{WITHOUT}the model must be in bfloat16"),
    "NVFP4": (packed({"quant_algo": "NVFP4"}, "weight"), f"{SIXTEEN} through twell, got U8 by NVFP4"),
    "AWQ": (packed({"quant_method": "awq"}, "qweight"), "F32 or F8_E4M3, got a checkpoint by awq"),
    "no gate": (without("1.mlp.gate_proj"), f"model.layers.1.mlp.gate_{MATRIX}none"),
    "no down": (without("1.mlp.down_proj"), f"1.mlp.down_{MATRIX}none"),
    "no last layer": (without("layers.2."), "num_hidden_layers = 3, got 2 layers from 0 to 1"),
    "no first layer": (without("layers.0."), "num_hidden_layers = 3, got 2 layers from 1 to 2"),
    "a tower": (lambda name, w: {name: w, f"tower.{name}": w.clone()}, "a number of its own, got model."),
    "nothing": (by(".mlp.", lambda w: w[:, :0] if len(w) == 64 else w[:0]), f"{MATRIX}[0, 64]"),
    "int8": (by("up_proj", lambda w: w.to(torch.int8)), SIXTEEN),
    "e4m3 alone": (by("down_proj", lambda w: w.to(torch.float8_e4m3fn)), "through twell, got F8_E4M3"),
    "narrow": (by("1.mlp.down", lambda w: w[:, :-8]), "must be [64, 320] or [320, 64], whose order tells the"),
    "square": (
        (lambda _, w: w[:64] if len(w) == 320 else w[..., :64].clone(), {"intermediate_size": 64}),
        "vLLM serves LlamaForCausalLM with ReLU",
    ),
    "rows": (by("down_proj", lambda w: w.T), "vLLM reads down weights [hidden, intermediate]"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_are_those_that_a_server_takes(name: str, llama: Path, capsys: Any) -> None:
    changes, said = FILES[name]
    change, settings = changes if isinstance(changes, tuple) else (changes, {})
    if change is not None:
        rewrite(llama, change)
    configure(llama, **settings)
    assert said in check(capsys, llama, *SIZES)
    if name == "in e4m3":
        # where ModelOpt says it beside the configuration
        configure(llama, quantization_config=None)
        (llama / "hf_quant_config.json").write_text(json.dumps({"quantization": CHANNEL}))
        assert said in check(capsys, llama, *SIZES)


CONFIGURATIONS: dict[str, tuple[dict[str, Any], list[object], str]] = {
    "union": ({"sparsity_strategy": "union"}, [], 'Strategy: "union", sparsity_strategy of the configuration'),
    "dense": ({"sparsity_strategy": "dense"}, [], 'Strategy: "dense", sparsity_strategy of the configuration'),
    "row": ({"sparsity_invariant": True}, [], 'Strategy: "row" with sparsity_invariant of the configuration'),
    "heads": ({"num_attention_heads": 80}, ["--ranks", 80], f"{WITHOUT}sizes of a rank: N must"),
    "figures": ({"sparsity_figures": [[1, 0.5, 0.5]] * 2 + [[10**400, 0.5, 0.5]]}, [], "must have [non-zeros, share,"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_what_a_configuration_asks_for(name: str, llama: Path, capsys: Any) -> None:
    settings, options, said = CONFIGURATIONS[name]
    configure(llama, **settings)
    assert said in check(capsys, llama, *SIZES, *options, "--json", llama / "out.json")
    if name in ("union", "dense", "row"):
        assert {row["route"] for row in json.loads((llama / "out.json").read_text())["rows"]} == {name}


def test_broken_json_is_refused(llama: Path, capsys: Any) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text('{"weight_map": {"model.layers.0.mlp.up_proj.weight": 3}}')
    assert 'must have a "weight_map" of tensor names to files, got' in check(capsys, llama)
    (llama / "config.json").write_text('{"a": ' + "[" * 100_000)
    assert "must be a JSON object" in check(capsys, llama)


def test_figures_are_not_written_through_a_link(llama: Path, tmp_path: Path, capsys: Any) -> None:
    """Revisions in a download cache share files, and those of the others changed, too."""
    (snapshot := tmp_path / "snapshot").mkdir()
    for path in llama.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = (llama / "config.json").read_text()
    said = check(capsys, snapshot, "--text", llama / "text.txt", "--tokens", 600, "--save")
    assert "--save: expected a config.json of the folder's own, got a link to" in said
    assert (llama / "config.json").read_text() == before
