"""Layouts of down weights in files: names, shapes, markers, and headers of safetensors."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors.torch import save_file

from twell.integrations import layouts
from twell.integrations.layouts import LAYOUT_KEY

K, N = 8, 12


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.down_proj.weight", True),
        ("language_model.model.layers.11.mlp.down_proj.weight", True),
        ("_orig_mod.module.layers.1.mlp.experts.3.down_proj.weight", True),
        ("down_proj.weight", True),
        ("model.decoder.layers.3.fc2.weight", True),
        ("decoder.layers.13.fc2.weight", True),
        ("vision_model.encoder.layers.3.mlp.fc2.weight", False),
        ("model.layers.0.mlp.down_proj.bias", False),
        ("model.layers.0.mlp.down_proj.lora_A.weight", False),
        ("model.layers.0.mlp.up_proj.weight", False),
        ("model.layers.0.mlp.countdown_proj.weight", False),
        ("model.layers.0.mlp.down_proj.weight_scale", False),
        ("model.decoder.layers.3.fc2.bias", False),
    ],
)
def test_names_of_down_weights_are_recognised(name: str, expected: bool) -> None:
    assert layouts.is_down(name) is expected


def test_shapes_tell_the_layout() -> None:
    assert layouts.down_layout([K, N], K, N) == "linear"
    assert layouts.down_layout(torch.Size([N, K]), K, N, {}) == "rows"
    for marker in layouts.LAYOUTS:
        assert layouts.down_layout((K, K), K, K, {LAYOUT_KEY: marker}) == marker
        assert layouts.down_layout((K, N), K, N, {LAYOUT_KEY: "linear"}) == "linear"


@pytest.mark.parametrize(
    ("shape", "intermediate", "marker", "message"),
    [
        ((K, K), K, None, r"a square down weight \[8, 8\] may be stored either way: expected sparsity_down_layout"),
        ((K, N), N, "rows", r"sparsity_down_layout is 'rows', so the down weight must be \[12, 8\], got \[8, 12\]"),
        ((N, K), N, "linear", r"sparsity_down_layout is 'linear', so the down weight must be \[8, 12\], got \[12, 8\]"),
        ((K, N + 1), N, None, r"the down weight must be \[8, 12\] \(linear\) or \[12, 8\] \(rows\), got \[8, 13\]"),
        ((K * N,), N, None, r"got \[96\]"),
        ((2, K, N), N, None, r"got \[2, 8, 12\]"),
        ((K, K), K, "columns", r"sparsity_down_layout must be \"linear\" or \"rows\", got 'columns'"),
        ((K, K), K, ["rows"], r"got \['rows'\]"),
    ],
)
def test_layouts_that_are_refused(shape: Sequence[int], intermediate: int, marker: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layouts.down_layout(shape, K, intermediate, None if marker is None else {LAYOUT_KEY: marker})


def test_lengths_come_from_the_neighbours_then_from_the_configuration() -> None:
    down, up = "layers.0.mlp.down_proj.weight", "layers.0.mlp.up_proj.weight"
    # the shapes of a pruned layer count more than the configuration
    assert layouts.layouts({down: [K, 5], up: [5, K]}, {"hidden_size": K, "intermediate_size": N}) == {down: "linear"}
    assert layouts.layouts({down: [N, K]}, {"hidden_size": K, "intermediate_size": N}) == {down: "rows"}
    nested = {"text_config": {"hidden_size": K, "intermediate_size": N}}
    assert layouts.layouts({down: [N, K]}, nested) == {down: "rows"}
    # the paper's models have the neurons of their own key
    paper = {"hidden_size": K, "intermediate_size": 99, "sparsity_new_intermediate_size": N}
    assert layouts.layouts({down: [N, K]}, paper) == {down: "rows"}
    assert layouts.layouts({down: [N, K]}, paper | {"sparsity_new_intermediate_size": None, "intermediate_size": N})
    opt = "model.decoder.layers.0.fc2.weight"
    assert layouts.layouts({opt: [N, K]}, {"hidden_size": K, "ffn_dim": N}) == {opt: "rows"}
    assert layouts.layouts({opt: [K, N], opt.replace("fc2", "fc1"): [N, K]}) == {opt: "linear"}
    assert layouts.layouts({"down_proj.weight": [K, N], "up_proj.weight": [N, K]}) == {"down_proj.weight": "linear"}
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj.weight: expected up_proj or gate_proj beside it"):
        layouts.layouts({down: [K, N]})
    with pytest.raises(
        ValueError, match=r"must all be \[intermediate, hidden\], got layers.0.mlp.up_proj.weight \[12, 8"
    ):
        layouts.layouts({down: [K, N], up: [N, K], "layers.0.mlp.gate_proj.weight": [N + 1, K]})


def test_the_marker_may_be_in_either_place() -> None:
    shapes = {"down_proj.weight": [K, K], "up_proj.weight": [K, K]}
    rows: dict[str, str] = {LAYOUT_KEY: "rows"}
    for settings, metadata in ((rows, None), (rows, {}), (None, rows), (rows, rows), ({}, rows)):
        by_name = None if metadata is None else {"down_proj.weight": metadata}
        assert layouts.layouts(shapes, settings, by_name) == {"down_proj.weight": "rows"}
    with pytest.raises(ValueError, match="in the configuration and in the file's metadata, got 'linear' and 'rows'"):
        layouts.layouts(shapes, {LAYOUT_KEY: "linear"}, {"down_proj.weight": rows})


def test_headers_are_read_as_they_stand(tmp_path: Path) -> None:
    state = {"b": torch.zeros(3, 2), "a é": torch.ones(2, dtype=torch.bfloat16), "none": torch.zeros(0, 4)}
    path = tmp_path / "x.safetensors"
    save_file(state, path, {"format": "pt", "note": "ü"})
    header = layouts.read_header(path)
    assert header.metadata == {"format": "pt", "note": "ü"}
    assert {name: stored.shape for name, stored in header.tensors.items()} == {
        n: tuple(t.shape) for n, t in state.items()
    }
    data = path.read_bytes()
    stored = header.tensors["a é"]
    assert data[stored.start : stored.stop] == b"\x80\x3f\x80\x3f"


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "overlap"])
def test_damaged_files_are_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(4, 4)}, path)
    data = path.read_bytes()
    named = {name: {"dtype": "F32", "shape": [4], "data_offsets": [at, at + 16]} for name, at in (("a", 0), ("b", 8))}
    text = json.dumps(named).encode()
    overlap = len(text).to_bytes(8, "little") + text + bytes(24)
    path.write_bytes({"empty": b"", "cut": data[:-1], "text": b"hello world", "overlap": overlap}[damage])
    with pytest.raises(ValueError, match="must be a safetensors file, got"):
        layouts.read_header(path)
