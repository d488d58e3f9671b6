"""``twell info``: complete without GPU, driver or library, and exact."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from tiny_kernels import package_tiny

from twell.commands import cli, info
from twell.runtime import cache, device, host, packaged, specs
from twell.runtime.log import logger


def write_library(folder: Path, **changes: object) -> None:
    """Write a manifest of this installation's versions beside a broken library."""
    symbols = ["gate_pack_bf16_t144", "unpack_bf16"]
    package_tiny(folder, specs.UnpackSpec("bfloat16"), 7, **{"symbols": symbols, **changes})
    (folder / packaged.LIBRARY).write_bytes(b"not a library")


def test_text_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for name in ("torch", "cuda-python", "apache-tvm-ffi", *packaged.RUNTIME_PACKAGES.values(), *info.VARIABLES):
        assert name in printed
    assert str(packaged.load_runtime()) in printed


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["versions"]["torch"] == torch.__version__
    assert set(state) == {
        *("versions", "devices", "device_problem", "kernels", "launches", "cache", "rates", "environment")
    }
    assert set(state["environment"]) == set(info.VARIABLES)
    if not state["devices"]:
        assert state["device_problem"]


def test_without_driver_or_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "describe", lambda: device.Driver(None, (), "cuda-python is not usable"))
    state = info.collect()
    text = "\n".join(info.lines(state))
    assert state["versions"]["CUDA driver"] == "none"
    assert "cuda-python is not usable" in text


def test_says_which_devices_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = (
        device.Device(0, "Big", (9, 0), 132, 141 << 30),
        device.Device(1, "Small", (7, 5), 76, 16 << 30),
        device.Device(2, "Other", (8, 9), 76, 16 << 30),
    )
    monkeypatch.setattr(device, "describe", lambda: device.Driver((13, 0), devices))
    state = info.collect()
    assert [d["sparse"] for d in state["devices"]] == [True, False, True]
    text = "\n".join(info.lines(state))
    assert len(re.findall(r"\n  name +(?:Big|Small|Other)\n", text)) == 3
    for said in (
        "sparse kernels\n",
        "no sparse kernels: they need compute capability 8.x, 9.x, 10.x or 12.x; ",
        "kernels of",
    ):
        assert re.search(rf"\n  runs +{said}", text)
    assert re.search(r"CUDA driver +13\.0", text)
    assert [(each["gpu"], each["measured_on"]) for each in state["rates"]] == [("Big", "NVIDIA H200"), ("Other", "")]
    assert all("`twell tune` measures" in each["problem"] for each in state["rates"])


def test_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "_lib"
    write_library(folder)
    monkeypatch.setattr(packaged, "FOLDER", folder)
    state = info.collect()
    assert state["kernels"]["usable"]
    assert not state["kernels"]["loads"]
    text = "\n".join(info.lines(state))
    assert "2 kernels" in text
    assert state["kernels"]["symbols"] == ["gate_pack_bf16_t144", "unpack_bf16"]
    assert state["kernels"]["problems"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"arch": "sm_80"}, "built for sm_80, expected sm_90a"), ({"source_hash": "0"}, "sources changed")],
)
def test_library_that_is_not_used(
    tmp_path: Path, changes: dict[str, object], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "_lib"
    write_library(folder, **changes)
    monkeypatch.setattr(packaged, "FOLDER", folder)
    before = list(logger.handlers), logger.propagate, logger.level
    try:
        # the reason is given each time, whatever is logged
        for level in (logger.level, logging.CRITICAL):
            logger.setLevel(level)
            state = info.collect()
            assert state["kernels"]["present"]
            assert not state["kernels"]["usable"]
            assert problem in "\n".join(info.lines(state))
            assert (list(logger.handlers), logger.propagate, logger.level) == (*before[:2], level)
    finally:
        logger.setLevel(before[2])


def test_says_what_launches_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_library: Path) -> None:
    folder = tmp_path / "_lib"
    folder.mkdir()
    monkeypatch.delenv("TWELL_DEBUG", raising=False)
    monkeypatch.setattr(packaged, "FOLDER", folder)
    monkeypatch.setattr(host, "_in_use", host._in_use.__wrapped__)
    library = folder / host.LIBRARY
    assert info.collect()["launches"].startswith("Python (no libtwell_host.so: `pip install .` or")
    library.write_bytes(host_library.read_bytes())
    assert info.collect()["launches"] == "C (libtwell_host.so)"
    monkeypatch.setenv("TWELL_DEBUG", "yes")
    assert info.collect()["launches"].startswith("invalid: environment variable TWELL_DEBUG must be one of")


def test_cache_is_counted_and_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernels"
    monkeypatch.setenv("TWELL_CACHE_DIR", str(folder))
    assert list(info._cache().values()) == [str(folder), 0, 0, 0, None]
    assert not folder.exists()
    for name, size in ((f"{cache.fingerprint()}/a.0.so", 10), ("older/b.0.o", 5), ("older/b.lock", 7)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(size))
    assert list(info._cache().values()) == [str(folder), 2, 15, 1, None]


def test_environment_in_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    right = {"TWELL_LOG": "debug"}
    for name, value in {**right, "TWELL_CACHE_DIR": "relative", "TWELL_DEBUG": "yes", "TWELL_VLLM": "of"}.items():
        monkeypatch.setenv(name, value)
    state = info.collect()
    assert right.items() <= state["environment"].items()
    for name in ("TWELL_DEBUG", "TWELL_VLLM"):
        assert state["environment"][name].startswith(f"invalid: environment variable {name} must be one of")
    assert state["environment"]["TWELL_CACHE_DIR"].startswith("invalid: ")
    assert state["cache"]["problem"]
    assert "environment variable TWELL_CACHE_DIR must be" in "\n".join(info.lines(state))
