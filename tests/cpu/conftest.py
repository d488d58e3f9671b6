"""What several files use: processes that import the checkout, and text."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "python"), str(root)]), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def free_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "auto" choose on the CPU as it does on a GPU, by the GPU's times alone."""
    from twell.choose import cards, rates

    monkeypatch.setattr(cards, "imposed", lambda kind, index: "")
    monkeypatch.setattr(rates, "HOST", {False: {}, True: {}})


@pytest.fixture
def chooses(free_choice: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The transfers of ``free_choice``, by times in which the sizes of ``auto_layers`` matter."""
    import auto_layers

    from twell.choose import measurement, rates

    arrivals = auto_layers.Arrivals()
    monkeypatch.setattr(measurement, "Transfer", arrivals)
    monkeypatch.setattr(rates, "seconds", auto_layers.seconds)
    return arrivals


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A GPU of compute capability 9.0 whose kernels record their arguments: ``fake_gpu.FakeGpu``."""
    import fake_gpu

    yield fake_gpu.install(monkeypatch)
    # the programs hold its kernels
    fake_gpu.forget_programs()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    import tiny_kernels

    return tiny_kernels.install(monkeypatch)


@pytest.fixture
def entries_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no loaded kernels and no packaged library; the folder of entries."""
    from twell.runtime import cache, log, packaged, resolve

    for name in ("TWELL_LOG", "TWELL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(packaged, "FOLDER", tmp_path / "nothing")
    monkeypatch.setattr(resolve, "_kernels", {})
    monkeypatch.setattr(resolve, "_missing", set())
    log.warn_once.cache_clear()
    return tmp_path / "cache" / cache.fingerprint()


@pytest.fixture
def seeded() -> Iterator[None]:
    """Random numbers from the same seed, and no compiled code for the next test."""
    import torch

    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    import torch

    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import saved_models

    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_text(saved_models.text(3000))
    return path
