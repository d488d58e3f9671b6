"""The wheel: its files, and that it works in a clean environment away from the checkout."""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import tvm_ffi

from cute_kernels import catalog, fingerprint, specs
from twell.runtime import packaged

LIBRARY = "twell/_lib/libtwell_kernels.so"
SITE = Path(sysconfig.get_path("purelib"))


WHOLE = pytest.param(list(specs.ARCHITECTURES), id="all", marks=pytest.mark.nightly)


@pytest.fixture(scope="module", params=[pytest.param(["sm_90a"], id="Hopper"), WHOLE])
def parts(request: pytest.FixtureRequest) -> dict[str, str]:
    """The folder of each architecture's library: of the wheel of `make wheel`, and of ARCHITECTURES=all."""
    return {arch: "" if arch == "sm_90a" else arch for arch in request.param}


@pytest.fixture(scope="module")
def built(parts: dict[str, str], request: pytest.FixtureRequest) -> Path:
    wheel: Path = request.getfixturevalue("wheel" if len(parts) == 1 else "whole_wheel")
    return wheel


@pytest.fixture(scope="module")
def contents(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contents")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def clean(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; its dependencies come from this one."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # after the environment's own packages, and with the .pth files that dependencies bring
    (site / "dependencies.pth").write_text(f"import site; site.addsitedir({str(SITE)!r})\n")
    # where pip puts the libraries that ours looks for
    for package in ("nvidia_cutlass_dsl", "tvm_ffi"):
        (site / package).symlink_to(SITE / package)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    subprocess.run(
        [*pip, "--quiet", "--no-compile", "--no-index", "--no-deps", "--ignore-installed", str(built)], check=True
    )
    return folder


def run(clean: Path, *command: str) -> str:
    """Run a program of the clean environment outside the checkout; return its output."""
    program, *arguments = command
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    environment["TWELL_CACHE_DIR"] = str(clean / "cache")
    done = subprocess.run(
        [str(clean / "bin" / program), *arguments],
        cwd=clean,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_name_says_what_it_needs(built: Path, parts: dict[str, str], symbols: list[str]) -> None:
    # one wheel for every Python; auditwheel checked the platform tag
    assert built.name.endswith(f"-py3-none-manylinux_2_28_{platform.machine()}.whl")
    whole = len(symbols) == len(catalog.of_architecture("sm_90a"))
    assert built.stat().st_size < (14.1e6 if len(parts) > 1 else 5.2e6 if whole else 2.4e6)


def test_holds_twell_alone(contents: Path, parts: dict[str, str]) -> None:
    tops = {path.name for path in contents.iterdir()}
    assert tops == {"twell", next(contents.glob("*.dist-info")).name}
    assert (contents / "twell" / "py.typed").is_file()
    assert next(contents.glob("*.dist-info/licenses/LICENSE")).stat().st_size > 10_000
    assert not [path for path in contents.rglob("*") if path.suffix in (".o", ".pyc", ".ptx", ".cubin")]
    folder = contents / "twell" / "_lib"
    kernels = {
        (Path(part) / name).as_posix() for part in parts.values() for name in ("libtwell_kernels.so", "manifest.json")
    }
    # one for all architectures
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        "libtwell_host.so",
        *kernels,
    }


def test_manifests_name_the_build_and_libraries_none_of_its_paths(
    contents: Path, parts: dict[str, str], symbols: list[str], root: Path
) -> None:
    libraries = sorted((contents / "twell" / "_lib").rglob("*.so"))
    assert len(libraries) == len(parts) + 1
    for library in libraries:
        content = library.read_bytes()
        for place in (str(root), sys.prefix, str(Path.home()), "/tmp/", "site-packages", ".py\0"):
            assert place.encode() not in content, (library, place)
    for arch, part in parts.items():
        folder = contents / "twell" / "_lib" / part
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["arch"] == arch
        assert manifest["toolkit"] in ("cu12", "cu13")
        assert manifest["versions"] == fingerprint.versions()
        assert manifest["source_hash"] == fingerprint.source_hash()
        whole = [spec.symbol for spec in catalog.of_architecture(arch)]
        assert manifest["symbols"] == (symbols if arch == "sm_90a" else whole)


def test_info_of_the_installed_package(clean: Path, parts: dict[str, str], symbols: list[str]) -> None:
    state = json.loads(run(clean, "twell", "info", "--json"))
    assert state["launches"] == "C (libtwell_host.so)"
    kernels = state["kernels"]
    assert kernels["symbols"] == symbols
    assert kernels["packaged"] == list(parts)
    assert kernels["problems"] == []


@pytest.mark.parametrize("toolkit", ["cu12", "cu13", None])
def test_library_finds_the_runtime_of_either_toolkit(toolkit: str | None, contents: Path, tmp_path: Path) -> None:
    """Only through the paths inside it: nothing is loaded before. The runtimes share name and interface."""
    library = tmp_path / LIBRARY
    library.parent.mkdir(parents=True)
    shutil.copyfile(contents / LIBRARY, library)
    (tmp_path / "tvm_ffi").symlink_to(Path(tvm_ffi.__file__).parent)
    runtime = packaged.load_runtime()
    if toolkit:
        folder = tmp_path / "nvidia_cutlass_dsl" / toolkit / "lib"
        folder.mkdir(parents=True)
        (folder / runtime.name).symlink_to(runtime)
    load = [sys.executable, "-I", "-c", f"import ctypes; ctypes.CDLL({str(library)!r})"]
    said = subprocess.run(load, capture_output=True, text=True).stderr
    assert ("libcute_dsl_runtime.so: cannot open shared object file" in said) == (toolkit is None), said
    assert said == "" or toolkit is None


def test_library_that_launches_needs_tvm_ffi_alone(contents: Path, tmp_path: Path) -> None:
    """And finds it through the path inside it; it is small."""
    source = contents / "twell" / "_lib" / "libtwell_host.so"
    library = tmp_path / "twell" / "_lib" / source.name
    library.parent.mkdir(parents=True)
    shutil.copyfile(source, library)
    assert library.stat().st_size < 50_000
    load = [sys.executable, "-I", "-c", f"import ctypes; ctypes.CDLL({str(library)!r})"]
    said = subprocess.run(load, capture_output=True, text=True).stderr
    assert "libtvm_ffi.so: cannot open shared object file" in said
    (tmp_path / "tvm_ffi").symlink_to(Path(tvm_ffi.__file__).parent)
    assert subprocess.run(load, capture_output=True, text=True).stderr == ""


def test_every_packaged_kernel_loads_without_the_compiler(
    clean: Path, parts: dict[str, str], symbols: list[str]
) -> None:
    code = f"""
import sys, torch, twell
from twell.cute_kernels import catalog
from twell.nn import SparseGatedMLP
from twell.runtime import packaged
assert twell.__file__.startswith(sys.prefix), twell.__file__
for arch in {list(parts)}:
    for symbol in {symbols} if arch == "sm_90a" else [spec.symbol for spec in catalog.of_architecture(arch)]:
        assert packaged.find(symbol, arch) is not None, (arch, symbol)
assert packaged.find("gate_pack_bf16_c3") is None
mlp, x = SparseGatedMLP(64, 264), torch.randn(3, 5, 64)
with torch.no_grad():
    gate, up = torch.relu(x @ mlp.gate_proj.weight.T), x @ mlp.up_proj.weight.T
    torch.testing.assert_close(mlp(x), (gate * up) @ mlp.down_proj.weight.T)
assert "cutlass" not in sys.modules
"""
    run(clean, "python", "-c", code)


@pytest.mark.nightly
def test_an_index_takes_wheel_and_sources(wheel: Path, sdist: Path, clean: Path) -> None:
    for check in (["twine", "check", "--strict", wheel, sdist], ["check_wheel_contents", wheel]):
        done = subprocess.run([sys.executable, "-m", *map(str, check)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    pip = [sys.executable, "-m", "pip", "--python", str(clean / "bin" / "python"), "check"]
    said = subprocess.run(pip, capture_output=True, text=True).stdout
    assert not [line for line in said.splitlines() if line.startswith("twell ")], said
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in names if name.startswith((".venv", "build/", "dist/", "scratch", ".git/"))]


@pytest.fixture(scope="module")
def sdist(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", str(out), str(root)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    (path,) = out.glob("*.tar.gz")
    return path


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "symbols"),
    [([], ["reglu_bf16", "reglu_bf16_backward"]), (["--config-settings=wheel.cmake=false"], [])],
    ids=["two kernels", "no kernel"],
)
def test_sdist_installs(options: list[str], symbols: list[str], sdist: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TWELL_ARCHITECTURES": "sm_90a", "TWELL_SYMBOLS": " ".join(symbols), "TMPDIR": str(tmp_path)}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    place = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-compile", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, *options, f"--target={place}", str(sdist)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    info = [sys.executable, "-c", "import sys; from twell.commands.cli import main; sys.exit(main(['info', '--json']))"]
    environment |= {"PYTHONPATH": str(place), "TWELL_CACHE_DIR": str(tmp_path / "cache")}
    said = subprocess.run(info, env=environment, cwd=tmp_path, capture_output=True, text=True)
    state = json.loads(said.stdout)
    kernels = state["kernels"]
    # built with the kernels or not at all
    assert state["launches"].startswith("C (libtwell_host.so)" if symbols else "Python (no libtwell_host.so: ")
    assert (kernels["symbols"], kernels["present"], kernels["loads"]) == (symbols, bool(symbols), bool(symbols))
    assert str(place) in kernels["library"]
