"""The values of --workload."""

from pathlib import Path

import numpy as np
import pytest
import torch

from profiling.bench.workloads import parse
from twell import testing
from twell.commands.request import RequestError


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    folder = tmp_path / "recorded layers"
    folder.mkdir()
    write_layer(folder, 3)
    write_layer(folder, 12)
    return folder


def write_layer(folder: Path, layer: int, k: int = 16, n: int = 24) -> None:
    draw = np.random.default_rng(layer)
    np.savez(
        folder / f"layer{layer}.npz",
        x=draw.integers(-9, 9, (32, k), dtype=np.int8),
        x_scale=np.full((32, 1), 0.1, np.float32),
        w=draw.integers(-9, 9, (6, k), dtype=np.int8),
        w_scale=np.full((6, 1), 0.1, np.float32),
        alive=np.arange(6),
        quiet=draw.normal(size=k).astype(np.float32),
        n=n,
    )


@pytest.mark.parametrize(
    ("text", "name", "pattern"),
    [
        ("nnz=29", "nnz=29", testing.Workload(29)),
        ("topic=0.5,nnz=29.50", "nnz=29.5,topic=0.5", testing.Workload(29.5, rho=0.5)),
        ("nnz=29,skew=0,dead=0", "nnz=29", testing.Workload(29)),
        (
            "nnz=1e3,skew=1,topic=1,tokens=0.5,dead=.3",
            "nnz=1000,skew=1,tokens=0.5,dead=0.3,topic=1",
            testing.Workload(1000, neuron_sigma=1, token_sigma=0.5, dead=0.3, rho=1),
        ),
    ],
)
def test_parameters_make_a_workload_with_a_canonical_name(text: str, name: str, pattern: testing.Workload) -> None:
    (source,) = parse([text])
    assert (source.name, source.text, source.pattern) == (name, name, pattern)
    # the name selects the same workload
    assert parse([name]) == [source]


def test_recorded_layers_are_found_by_folder_and_number(recorded: Path) -> None:
    everything = parse([f"real:{recorded}"])
    assert [source.name for source in everything] == ["real3", "real12"]
    assert parse([f"real:{recorded}/3"]) == everything[:1]
    # its text selects one of them
    assert [parse([source.text]) for source in everything] == [[source] for source in everything]
    assert parse([f"real:{recorded}", f"real:{recorded}/12"]) == everything
    problem = everything[0].load(40, 1, 1, device="cpu", dtype=torch.float16)
    assert problem.x.shape == (40, 16)
    assert problem.w_gate.shape == (24, 16)
    assert problem.x.dtype is torch.float16
    assert everything[0].possible(1)


def test_recorded_layers_must_exist(recorded: Path, tmp_path: Path) -> None:
    for text, got in ((f"{recorded}/4", "3, 12"), (f"{tmp_path}", "none"), (f"{tmp_path}/no/3", "none")):
        with pytest.raises(RequestError, match=rf"expected layer0.npz, .*, or one of its layers, got {got}"):
            parse([f"real:{text}"])
    (tmp_path / "other").mkdir()
    write_layer(tmp_path / "other", 3)
    with pytest.raises(RequestError, match="are both real3: time them in two runs"):
        parse([f"real:{recorded}/3", f"real:{tmp_path / 'other'}"])


def test_a_broken_recording_is_refused(recorded: Path) -> None:
    (source,) = parse([f"real:{recorded}/3"])
    with np.load(recorded / "layer3.npz") as arrays:
        np.savez(recorded / "layer3.npz", **{**arrays, "alive": np.arange(6) + 20})
    said = r"expected tokens, and a row of w for each of the distinct neurons"
    for message, content in ((said, None), (r"real:.*/3 cannot be read", b"PK\x03\x04 no archive")):
        if content is not None:
            (recorded / "layer3.npz").write_bytes(content)
        with pytest.raises(RequestError, match=message):
            source.load(8, 1, 1, device="cpu", dtype=torch.bfloat16)
