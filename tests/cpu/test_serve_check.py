"""``twell serve-check``: figures and where they come from, strategies against the table, sums, files, bad input."""

import json
import math
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import saved_models
from safetensors.torch import load_file, save_file

from profiling import figures, float8
from twell.choose import rates
from twell.choose.site import AutoStrategy
from twell.commands import cli, serve_check
from twell.float8 import quantize
from twell.integrations import vllm
from twell.integrations.layouts import LayerFigures, measured

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


def check(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = cli.main(["serve-check", *map(str, words)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


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
    status, out, _ = check(capsys, llama, *SIZES, "--json", llama / "out.json")
    assert status == 0
    assert "Figures: assumed, 1.7 non-zeros per token" in out
    assert re.search(r"gate and up in one product for up to 512 tokens, .*;\n  `twell analyze` takes it for two", out)
    data = json.loads((llama / "out.json").read_text())
    assert [(row["layer"], row["tokens"], row["decode"]) for row in data["rows"][:4]] == [
        (0, 2048, False),
        (0, 1, True),
        (0, 64, True),
        (1, 2048, False),
    ]
    for row in data["rows"]:
        problem = rates.Problem(row["tokens"], 64, 320, True, False, merged=row["tokens"] <= 512)
        known = rates.Figures(320 / 190, 1 - (1 - 1 / 190) ** 128)
        decision = rates.decide(problem, known, None)
        assert row["costs"] == decision.costs
        assert (row["strategy"], row["reason"]) == decision[:2]
        assert row["share"] == decision.costs[decision.strategy]
    assert "assumed, 320.0 non-zeros per token, tokens" in check(capsys, llama, *SIZES, "--nnz", 320)[1]


def test_measured_figures_are_those_of_the_gates(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = check(capsys, llama, *SIZES, "--text", llama / "text.txt", "--save", "--tokens", 2048)
    assert status == 0
    assert "Figures: measured on 2,048 tokens of 1 file, 8 sequences of up to 256" in out
    found = measured(json.loads((llama / "config.json").read_text()), 3)
    assert found is not None
    for fired, of in zip(firings(llama), found, strict=True):
        assert of.nonzeros == pytest.approx(fired.sum().item() / len(fired), abs=0.01)
        assert of.text == pytest.approx(fired.view(-1, 128, 320).any(1).float().mean().item(), abs=1e-4)
        # more neurons fire on tokens of several texts, and no more than by chance
        assert of.text - 0.02 <= of.batch <= 1 - (1 - of.nonzeros / 320) ** 128
    status, out, _ = check(capsys, llama, *SIZES)
    assert status == 0
    assert "Figures: measured earlier, sparsity_figures of the configuration" in out
    assert f"{found[0].nonzeros:,.1f}" in out


@pytest.mark.parametrize("decode", [False, True])
def test_unions_are_those_that_a_server_takes_for_as_many_tokens(decode: bool) -> None:
    layer = serve_check.Layer("model.layers.0.mlp", 0, 2048, 5632, 0.5)
    figures = LayerFigures(30.0, 0.05, 0.4)
    for m, union in ((1, 0.4), (512, 0.4), (1024, 0.4), (1025, 0.05), (2048, 0.05), (16384, 0.05)):
        row = serve_check.predict(layer, figures, m, decode, ranks=2)
        problem = rates.Problem(m, 2048, 2816, True, False, merged=m <= 512)
        assert row.costs == rates.decide(problem, rates.Figures(15.0, union), None).costs
        # a server's layer, as ServedStrategy.learn tells it
        site = AutoStrategy()
        for typical, of in ((vllm.BATCH, figures.batch), (vllm.PROMPTS, figures.text)):
            site.observe(problem._replace(m=typical), rates.Figures(15.0, of))
        site.choose(problem)
        assert [choice.costs for choice in site.explain()] == [row.costs]


def test_sums_weigh_layers_by_their_weights_and_those_beside_as_dense() -> None:
    layers = [serve_check.Layer("a", 0, 64, 64, 1.0), serve_check.Layer("b", 1, 64, 192, 1 / 3)]
    rows = [serve_check.Row(i, 1, True, "row", share, "", {}) for i, share in enumerate((0.2, 0.6))]
    assert serve_check.share(layers, rows, False) == pytest.approx(0.25 * 0.2 + 0.75 * 0.6)
    assert serve_check.share(layers, rows, True) == pytest.approx((0.25 * 0.2 + 0.75 * 0.6 + 0.5) / 1.5)


@pytest.mark.parametrize(("model_type", "rows"), [("llama_sparse_relu", True), ("sparse_llama", False)])
def test_sparse_checkpoint_that_lies_is_measured_with_relu(
    model_type: str, rows: bool, saved: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SIZES, "--text", saved / "text.txt", "--tokens", 2048, "--batch", 4]
    status, out, _ = check(capsys, saved, *words)
    assert status == 0
    configure(llama, architectures=["SparseLlamaForCausalLM"], hidden_act="silu", model_type=model_type)
    if rows:
        store_rows(llama)
    before = json.loads((llama / "config.json").read_text())
    status, sparse, _ = check(capsys, llama, *words, "--save")
    assert status == 0
    assert "its configuration says 'silu', which is ignored" in sparse
    figures = "Figures: measured on 2,048 tokens"
    assert out[out.index(figures) :] == sparse[sparse.index(figures) : sparse.index("Figures written")]
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
    status, out, _ = check(capsys, llama, *words)
    assert status == 0
    assert f"vLLM serves {architecture} with {name}, through twell" in out
    # saved figures do not change how a model is read
    assert check(capsys, llama, *words)[:2] == (0, out)
    found = measured(json.loads((llama / "config.json").read_text()), 3)
    assert found is not None
    if activation != "relu2":
        for fired, of in zip(firings(llama, activation, **threshold), found, strict=True):
            assert of.nonzeros == pytest.approx(fired.sum().item() / len(fired), abs=0.01)


def test_odd_sizes_are_said_to_run_without_twell(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(llama, num_attention_heads=80)
    status, out, _ = check(capsys, llama, *SIZES, "--ranks", 80)
    assert status == 0
    assert "vLLM serves LlamaForCausalLM with ReLU\n" in out
    assert "All layers run as without twell: sizes of a rank: N must be a positive multiple of 8" in out


def test_broken_json_is_refused(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(llama, sparsity_figures=[[1, 0.5, 0.5]] * 2 + [[10**400, 0.5, 0.5]])
    assert "must have [non-zeros, share, share]" in check(capsys, llama)[2]
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text('{"weight_map": {"model.layers.0.mlp.up_proj.weight": 3}}')
    status, _, err = check(capsys, llama)
    assert status == 2
    assert 'must have a "weight_map" of tensor names to files, got' in err
    (llama / "config.json").write_text('{"a": ' + "[" * 100_000)
    status, _, err = check(capsys, llama)
    assert status == 2
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


def test_shares_in_e4m3_are_those_that_were_measured() -> None:
    """Beside the fastest dense fp8, by what a checkpoint and its text tell: no heaviest tokens."""
    found = [row for path in figures.RESULTS.glob("float8*.json") for row in json.loads(path.read_text())["rows"]]
    points = float8.points(row for row in found if "nonzeros" in row)
    assert len(points) == 37
    for (m, k, n, *_), (nonzeros, union, *_), shares in points:
        layer = serve_check.Layer("", 0, k, n, 0.0, "F8_E4M3")
        assert union is not None
        row = serve_check.predict(layer, LayerFigures(nonzeros, union, union), m, True, 1)
        assert row.costs == pytest.approx(shares, rel=0.1), (m, k)
        assert row.share == row.costs[row.strategy] == min(row.costs.values())
        # "auto" takes the fastest
        assert shares[row.strategy] == min(shares.values())
        assert nonzeros / n <= rates.FLOAT8_DENSITY
        assert serve_check._apart(layer, LayerFigures(nonzeros, union, union), 1, rates.SHIPPED)[0] <= 1


def test_times_in_16_bits_allow_for_tokens_that_vary() -> None:
    """Text tells no heaviest tokens, which calls wait for; neurons that tokens share tell that these vary."""
    found = json.loads((figures.RESULTS / "tuning.json").read_text())["rows"]
    ratios = []
    for row in found:
        inference = row["gated"] and not row["training"] and row["strategy"] == "row" and row["m"] >= 128
        if inference and not row["red"] and row["nonzeros"] < row["n"] / 10:
            layer = serve_check.Layer("", 0, row["k"], row["n"], 0.0)
            of = LayerFigures(row["nonzeros"], row["union"], row["union"])
            found_share = serve_check.predict(layer, of, row["m"], False, 1).costs["row"]
            ratios.append(math.log(found_share / row["relative"]))
    assert len(ratios) > 400
    assert abs(statistics.fmean(ratios)) < 0.1


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
@pytest.mark.parametrize("size", [(2048, 5632), (64, 320)])
@pytest.mark.parametrize("share", [0.004, 0.5])
def test_no_verdict_far_from_what_was_measured(dtype: str, size: tuple[int, int], share: float) -> None:
    layer, of = serve_check.Layer("", 0, *size, 0.5, dtype), LayerFigures(share * size[1], 0.3, 0.3)
    row = serve_check.predict(layer, of, 1, True, 1)
    *_, said = serve_check._report(Path(), [layer], [of], [row], [], 1, rates.SHIPPED)
    far = size[0] == 64 or (share == 0.5 and layer.float8)
    assert said.startswith(f"Verdict: {'none, too far from all measured layers' if far else 'FFNs gain'}")
    assert ("H100" in said) == (layer.float8 and not far)


def test_layers_in_e4m3_are_predicted(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised(llama, CHANNEL | {"ignore": ["model.layers.1.*"]})
    # the lists of a checkpoint and its files must agree
    assert "model.layers.1.mlp.gate_proj.weight must be BF16 or F16 or F32" in check(capsys, llama, *SIZES)[2]
    configure(llama, quantization_config=None)
    (llama / "hf_quant_config.json").write_text(json.dumps({"quantization": CHANNEL}))
    status, out, _ = check(capsys, llama, *SIZES)
    assert status == 0
    assert "vLLM serves LlamaForCausalLM with ReLU, through twell\n" in out
    assert "3 of 3 layers have weights in e4m3: their dense is in e4m3, too, and copies no weight" in out
    assert re.search("Predicted from times measured on .* in e4m3", out)


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
    status, _, err = check(capsys, llama)
    assert status == 2
    got = " ".join(next(iter(settings.items())))
    assert f"a scale by row, tensor or block of 128 x 128, got {got}: take a checkpoint in bfloat16 or in such" in err
    assert len(err.splitlines()) == 1


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
    status, out, _ = check(capsys, llama, *SIZES)
    assert status == 0
    assert "vLLM serves LlamaForCausalLM with ReLU\n" in out
    assert "3 of 3 layers run as without twell: " in out
    assert reason in out


def test_some_layers_may_stay_in_16_bits(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised(llama, CHANNEL | {"ignore": ["model.layers.1.*", "model.layers.2.*"]}, layers="layers.0.")
    status, out, _ = check(capsys, llama, *SIZES)
    assert status == 0
    assert "1 of 3 layers have weights in e4m3" in out
    assert "Predicted from times measured" in out


def test_projections_of_a_layer_are_quantised_alike(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised(llama, CHANNEL | {"ignore": ["*.gate_proj"]}, layers="up_proj|down_proj")
    said = "model.layers.0.mlp.up_proj must be quantised as the projections beside it, which vLLM merges, got scales by"
    assert f"{said} row and by none" in check(capsys, llama, *SIZES)[2]


def test_figures_are_not_written_through_a_link(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Revisions in a download cache share files, and those of the others changed, too."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in llama.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = (llama / "config.json").read_text()
    status, _, err = check(capsys, snapshot, "--text", llama / "text.txt", "--tokens", 600, "--save")
    assert (status, "--save: expected a config.json of the folder's own, got a link to" in err) == (2, True)
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
    status, _, err = check(capsys, llama)
    assert status == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_weights_of_32_bits_are_said_to_become_16(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warning = "vLLM turns them to 16 bits; with --dtype float32 they run as without twell"
    assert warning in check(capsys, llama, *SIZES)[1]
    weights = {name: weight.bfloat16() for name, weight in load_file(llama / "model.safetensors").items()}
    save_file(weights, llama / "model.safetensors")
    status, out, _ = check(capsys, llama, *SIZES)
    assert status == 0
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
    status, out, _ = check(capsys, llama, *SIZES, "--json", llama / "out.json")
    assert status == 0
    assert f"Strategy: {said} the configuration" in out
    written = json.loads((llama / "out.json").read_text())
    assert written["strategy"] == strategy + "+invariant" * ("sparsity_invariant" in settings)
    assert all((row["strategy"], row["share"]) == (strategy, row["costs"].get(strategy)) for row in written["rows"])
