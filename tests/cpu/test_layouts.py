"""Layouts of down weights in files: names, shapes, markers; headers and indices of safetensors files."""

import json
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
        ("_orig_mod.module.layers.1.mlp.experts.3.down_proj.weight", True),
        ("down_proj.weight", True),
        ("decoder.layers.13.fc2.weight", True),
        ("vision_model.encoder.layers.3.mlp.fc2.weight", False),
        ("model.layers.0.mlp.down_proj.bias", False),
        ("model.layers.0.mlp.down_proj.lora_A.weight", False),
        ("model.layers.0.mlp.countdown_proj.weight", False),
        ("model.layers.0.mlp.down_proj.weight_scale", False),
    ],
)
def test_names_of_down_weights_are_recognised(name: str, expected: bool) -> None:
    assert layouts.is_down(name) is expected


@pytest.mark.parametrize(
    ("shape", "intermediate", "marker", "of_file", "found"),
    [
        ([K, N], N, None, None, "linear"),
        (torch.Size([N, K]), N, None, None, "rows"),
        ((K, N), N, "linear", None, "linear"),
        *(((K, K), K, marker, None, marker) for marker in layouts.LAYOUTS),
        ((K, K), K, None, "rows", "rows"),
        ((K, K), K, "rows", "rows", "rows"),
        ((K, K), K, "linear", "rows", "got [8, 8], and there 'linear' and 'rows'"),
        ((K, K), K, None, None, "as sparsity_down_layout in the configuration or in the file's metadata says"),
        ((K, N), N, "rows", None, "got [8, 12], and there 'rows'"),
        ((N, K), N, "linear", None, "got [12, 8], and there 'linear'"),
        ((K, N + 1), N, None, None, "the down weight must be [8, 12] (linear) or [12, 8] (rows), as"),
        ((2, K, N), N, None, None, "got [2, 8, 12], and there none"),
        ((K, K), K, "columns", None, "and there 'columns'"),
        ((K, K), K, ["rows"], None, "and there ['rows']"),
    ],
)
def test_layouts(shape: tuple[int, ...], intermediate: int, marker: object, of_file: str | None, found: str) -> None:
    config = {} if marker is None else {LAYOUT_KEY: marker}
    if found in layouts.LAYOUTS:
        assert layouts.down_layout(shape, K, intermediate, config, of_file) == found
        return
    with pytest.raises(ValueError) as error:  # noqa: PT011
        layouts.down_layout(shape, K, intermediate, config, of_file)
    assert found in str(error.value)


@pytest.mark.parametrize("damage", ["", "empty", "cut", "text", "overlap"])
def test_headers(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a é": torch.ones(2, dtype=torch.bfloat16), "none": torch.zeros(0, 4)}, path, {LAYOUT_KEY: "rows"})
    if not damage:
        assert layouts.read_header(path) == {"a é": ("BF16", (2,)), "none": ("F32", (0, 4))}
        assert layouts.markers(str(path)) == {"a é": "rows", "none": "rows"}
        return
    data = path.read_bytes()
    named = {name: {"dtype": "F32", "shape": [4], "data_offsets": [at, at + 16]} for name, at in (("a", 0), ("b", 8))}
    text = json.dumps(named).encode()
    overlap = len(text).to_bytes(8, "little") + text + bytes(24)
    path.write_bytes({"empty": b"", "cut": data[:-1], "text": b"hello world", "overlap": overlap}[damage])
    with pytest.raises(ValueError, match="must be a safetensors file, got"):
        layouts.read_header(path)
