"""Layouts of down weights in files: names, shapes; headers and indices of safetensors files."""

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors.torch import save_file

from twell.integrations import layouts

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


def test_the_shape_tells_the_layout() -> None:
    assert not layouts.lies_by_rows([K, N], K, N)
    assert layouts.lies_by_rows(torch.Size([N, K]), K, N)
    for shape, neurons in (((K, K), K), ((K, N + 1), N), ((2, K, N), N)):
        with pytest.raises(ValueError, match=rf"whose order tells the layout, got {re.escape(str(list(shape)))}"):
            layouts.lies_by_rows(shape, K, neurons)


@pytest.mark.parametrize("damage", ["", "empty", "cut", "text", "overlap"])
def test_headers(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a é": torch.ones(2, dtype=torch.bfloat16), "none": torch.zeros(0, 4)}, path)
    if not damage:
        assert layouts.read_header(path) == {"a é": ("BF16", (2,)), "none": ("F32", (0, 4))}
        return
    data = path.read_bytes()
    named = {name: {"dtype": "F32", "shape": [4], "data_offsets": [at, at + 16]} for name, at in (("a", 0), ("b", 8))}
    text = json.dumps(named).encode()
    overlap = len(text).to_bytes(8, "little") + text + bytes(24)
    path.write_bytes({"empty": b"", "cut": data[:-1], "text": b"hello world", "overlap": overlap}[damage])
    with pytest.raises(ValueError, match="must be a safetensors file, got"):
        layouts.read_header(path)
