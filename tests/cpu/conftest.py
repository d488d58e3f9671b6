"""What several files use: processes that import the checkout, text, and runs of examples/train.py on it."""

import os
from collections.abc import Callable, Iterator
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

    from twell.choose import rates
    from twell.choose import site as sites

    arrivals = auto_layers.Arrivals()
    monkeypatch.setattr(sites, "Transfer", arrivals)
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
    from twell._runtime import cache, log, packaged, resolve

    for name in ("TWELL_JIT", "TWELL_LOG", "TWELL_NVTX", "TWELL_DEBUG"):
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
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty files of text that can be learnt, and files that are not text."""
    import small_runs

    root = small_runs.write_text(tmp_path_factory.mktemp("text"), parts=3)
    (root / "image.txt").write_bytes(b"\x89PNG\0" * 1000)
    (root / "latin.txt").write_bytes("é".encode("latin-1") * 100)
    (root / ".hidden.txt").write_text("hidden " * 100)
    return root


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import saved_models

    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_text(saved_models.text(3000))
    return path


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(text: Path, cache: Path, tmp_path: Path) -> Callable[..., int]:
    import small_runs
    import train

    def run(*more: object, out: str = "out") -> int:
        return train.main(small_runs.command(text, cache, tmp_path / out, *more))

    return run
