"""twell's requirements, from a build's metadata: versions that serving engines pin fit, installed ones stay."""

import configparser
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from build import ProjectBuilder
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from twell.integrations import vllm
from twell.runtime import packaged

# Requires-Dist of the wheels on the package index, as far as they name what twell or one of its extras asks for. Then
# those of the versions that they pin: nvidia-cutlass-dsl 4.8.0 and its libraries, torch 2.14.0 and 2.14.1.
DSL_480 = ["nvidia-cutlass-dsl[cu13]==4.8.0"]
DSL_480 += [f"nvidia-cutlass-dsl-libs-{part}==4.8.0" for part in ("base", "core", "cu12", "cu13")]
DRIVER = ["cuda-bindings>=12.8", "cuda-bindings<14,>=13.0.3"]
OF_VLLM = ["apache-tvm-ffi==0.1.11", "safetensors>=0.6.2", "nvtx==0.2.15", *DRIVER]
ENGINES = {
    "vllm 0.31.0": ["torch==2.13.0", "transformers<5.18.0,>=5.10.4", "nvidia-cutlass-dsl[cu13]==4.7.1", *OF_VLLM],
    "vllm 0.32.0": ["torch==2.13.0", "transformers<5.20.0,>=5.16.1", *DSL_480, *OF_VLLM],
    "vllm 0.33.0": ["torch==2.14.0", "transformers<5.21.0,>=5.16.1", *DSL_480, *OF_VLLM],
    "sglang 0.5.23": [
        *("torch==2.14.1", "apache-tvm-ffi==0.1.11", "transformers==5.19.0", "cuda-python>=13.0", *DSL_480, *DRIVER)
    ],
}
RUNTIME = packaged.RUNTIME_PACKAGES[12]


@pytest.fixture(scope="module")
def project(root: Path) -> ProjectBuilder:
    return ProjectBuilder(root)


@pytest.fixture(scope="module")
def folder(project: ProjectBuilder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of metadata that a wheel would have; no kernel is compiled."""
    folder = project.prepare("wheel", tmp_path_factory.mktemp("metadata"))
    assert folder is not None
    return Path(folder)


@pytest.fixture(scope="module")
def metadata(folder: Path) -> Message:
    return Parser().parsestr((folder / "METADATA").read_text())


def requirements(metadata: Message, *extras: str) -> Iterator[Requirement]:
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def meet(ranges: list[SpecifierSet]) -> bool:
    bounds = {part.version for specifiers in ranges for part in specifiers if part.operator in ("==", ">=")}
    return any(all(specifiers.contains(bound) for specifiers in ranges) for bound in bounds)


@pytest.mark.parametrize("engine", ENGINES)
def test_installs_beside_the_serving_engines_that_it_admits(engine: str, metadata: Message) -> None:
    pins = [Requirement(line) for line in ENGINES[engine]]
    common, wrong = set(), []
    for ours in requirements(metadata, *metadata.get_all("Provides-Extra", [])):
        theirs = [pin.specifier for pin in pins if pin.name == canonicalize_name(ours.name)]
        wrong += [] if not theirs or meet([ours.specifier, *theirs]) else [f"twell asks for {ours}, not {theirs}"]
        common.update([ours.name] if theirs else [])
    name, version = engine.split()
    # the lowest version that an extra admits is the lowest that fits
    admitted = all(ours.specifier.contains(version) for ours in requirements(metadata, name) if ours.name == name)
    assert admitted == (not wrong), wrong
    if admitted:
        assert {"torch", "apache-tvm-ffi", RUNTIME, "nvidia-cutlass-dsl", "cuda-bindings", "transformers"} <= common


@pytest.mark.parametrize("installed", ["2.11.0+cu130", "2.13.0+cpu", "2.14.1", "2.15.0"])
def test_an_installed_torch_stays(installed: str, metadata: Message) -> None:
    (torch,) = (requirement for requirement in requirements(metadata) if requirement.name == "torch")
    assert torch.specifier.contains(installed)


def test_the_compiler_is_an_extra(metadata: Message) -> None:
    plain = {requirement.name for requirement in requirements(metadata)}
    assert plain == {"torch", "apache-tvm-ffi", RUNTIME, "cuda-bindings", "numpy"}
    assert {requirement.name for requirement in requirements(metadata, "jit")} - plain == {"nvidia-cutlass-dsl"}


def test_what_builds_and_what_runs_have_one_range(metadata: Message, project: ProjectBuilder) -> None:
    """The compiler and runtime of a kernel that the wheel lacks are those of the wheel's own kernels."""
    builds = {r.name: r.specifier for r in map(Requirement, project.build_system_requires)}
    runs = {r.name: r.specifier for r in requirements(metadata, "jit")}
    assert builds["nvidia-cutlass-dsl"] == runs["nvidia-cutlass-dsl"] == runs[RUNTIME] == SpecifierSet(packaged.RANGE)
    assert builds["apache-tvm-ffi"] == runs["apache-tvm-ffi"]


def test_an_extra_has_the_lowest_vllm(metadata: Message) -> None:
    (ours,) = (requirement for requirement in requirements(metadata, "vllm") if requirement.name == "vllm")
    assert ours.specifier == SpecifierSet(f">={'.'.join(map(str, vllm.LOWEST))}")


def test_vllm_finds_its_plugin(folder: Path) -> None:
    entries = configparser.ConfigParser()
    entries.read(folder / "entry_points.txt")
    expected = {"twell": f"{vllm.__name__}:{vllm.register.__name__}"}
    assert dict(entries["vllm.general_plugins"]) == expected
