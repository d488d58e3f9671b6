"""The bundle for a GPU host without network: what it holds, and that its run.sh makes commands work."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def bundle(wheel: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "bundle"
    command = [sys.executable, str(root / "tools" / "bundle.py"), "--wheel", str(wheel), "--python", PYTHON]
    subprocess.run([*command, "--out", str(out)], check=True)
    return out


@pytest.mark.parametrize("held", ["thesis.txt", "tests/mine.py"])
def test_replaces_nothing_but_a_bundle(
    held: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It removed --out whatever was in it, before it looked at anything else."""
    monkeypatch.syspath_prepend(str(root / "tools"))
    import bundle  # type: ignore[import-not-found]

    out, stub = tmp_path / "out", tmp_path / "broken.whl"
    stub.write_text("no archive")
    (out / held).parent.mkdir(parents=True)
    (out / held).write_text("mine")

    def make(wheel: Path) -> None:
        options = ["bundle", "--out", str(out), "--cache", str(tmp_path / "cache"), "--wheel", str(wheel)]
        monkeypatch.setattr(sys, "argv", options)
        bundle.main()

    for wheel, said in (
        (stub, "--out: expected a new folder or an earlier bundle"),
        (out / "none", "--wheel: expected"),
    ):
        with pytest.raises(SystemExit, match="2"):
            make(wheel)
        assert said in capsys.readouterr().err
        assert (out / held).read_text() == "mine"
    # an earlier bundle stays where the new one cannot be made
    (out / held).rename(out / "run.sh")
    with pytest.raises(zipfile.BadZipFile):
        make(stub)
    assert (out / "run.sh").read_text() == "mine"


def run(bundle: Path, *command: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run run.sh from another folder, with this Python as python3 and its own TMPDIR."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    environment["PATH"] = os.pathsep.join([str(path or Path(sys.executable).parent), environment["PATH"]])
    environment["TMPDIR"] = str(bundle.parent)
    return subprocess.run(
        [str(bundle / "run.sh"), *command],
        cwd=bundle.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.nightly
def test_holds_tests_package_and_kernels(bundle: Path, root: Path) -> None:
    for name in (
        "tests/conftest.py",
        "tests/gpu",
        "profiling",
        "pyproject.toml",
        "site/twell/nn/layers.py",
        "site/tvm_ffi",
    ):
        assert (bundle / name).exists(), name
    assert (bundle / "site/twell/_lib/libtwell_kernels.so").is_file()
    assert (bundle / "site/twell/_lib/libtwell_host.so").is_file()
    assert (bundle / "site/tvm_ffi/lib/libtvm_ffi.so").is_file()
    sizes = {p: p.stat().st_size for p in bundle.rglob("*") if p.is_file() and "scratch" not in p.parts}
    assert sum(sizes.values()) < 60e6, sorted(sizes.items(), key=lambda item: -item[1])[:5]
    for path in bundle.glob("run.sh"):
        assert str(root) not in path.read_text()


@pytest.mark.nightly
def test_runs_the_bundled_package_and_loads_its_kernels(bundle: Path) -> None:
    code = """
import sys, tvm_ffi, twell
# a GPU host has no DSL
sys.modules["nvidia_cutlass_dsl"] = None
from twell.runtime import host, packaged
for module in (tvm_ffi, twell):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
assert packaged.find("gate_pack_bf16_t144") is not None
assert host.runner() == "C (libtwell_host.so)"
assert "cutlass" not in sys.modules
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "libcute_dsl_runtime" in line}
assert all(path.startswith(sys.argv[2]) for path in loaded) and len(loaded) == 1, loaded
"""
    for _ in range(2):  # the first unpacks, the second finds it
        done = run(bundle, "python3", "-c", code, str(bundle / "site"), str(bundle.parent / "twell-bundle-"))
        assert done.returncode == 0, done.stderr
    assert not list(bundle.parent.glob("twell-bundle-*/part.*"))


@pytest.mark.nightly
def test_runs_commands(bundle: Path, tmp_path: Path) -> None:
    words = "-m profiling.bench ffn --workload nnz=4 -m 32 -k 32 -n 64 --device cpu --seconds 0.001".split()
    done = run(bundle, "python3", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on a CPU" in done.stdout
    done = run(bundle, "python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cpu/test_memory.py")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(bundle, "python3", "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "a b", "")
    assert (done.returncode, done.stdout.strip()) == (7, "['a b', '']")
    done = run(bundle)
    assert done.returncode == 2
    assert "usage: run.sh COMMAND" in done.stderr
    # another Python
    (tmp_path / "python3").write_text("#!/bin/sh\necho 2.7\n")
    (tmp_path / "python3").chmod(0o755)
    done = run(bundle, "true", path=tmp_path)
    assert done.returncode == 2
    assert f"this bundle is for Python {PYTHON}, python3 is 2.7" in done.stderr
