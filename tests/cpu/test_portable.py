"""Every GPU by its compute capability: import, kernels, refusal, fall-back; and the limits of the portable family."""

import dataclasses
import importlib
import logging
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_kernels import Compiler, package_tiny
from torch import Tensor

from cute_kernels import catalog
from tests import programs
from tests.cpu import fake_gpu
from twell.base.activation import RELU
from twell.choose import cards, rates, tuning
from twell.choose.plan import Route
from twell.commands import info
from twell.ops import hybrid
from twell.ops.operands import Layer
from twell.runtime import cache, device, geometry, log, packaged, program, resolve, specs

# the operators of the same names stand in front of the modules
gate_pack, hybrid_forward, twell_ffn = (
    sys.modules[f"twell.ops.{name}"] for name in ("gate_pack", "hybrid_forward", "ffn")
)

Capability = tuple[int, int]

# and the architecture whose code they run
GPUS: dict[Capability, str | None] = {
    (7, 5): None,
    **{(8, minor): "sm_80" for minor in (0, 6, 9)},
    (9, 0): "sm_90a",
    **{(10, minor): "sm_100" for minor in (0, 3)},
    (12, 0): "sm_120",
}
NAMES: dict[Any, str] = {capability: "{}.{}".format(*capability) for capability in GPUS}


def every_gpu(capabilities: Any) -> Any:
    return pytest.mark.parametrize("capability", capabilities, ids=NAMES.get)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Capability], None]:
    """Pretend that device 0 is a GPU of this compute capability, which no card is for."""

    def become(capability: Capability) -> None:
        monkeypatch.setattr(device, "capability", lambda index: capability)
        monkeypatch.setattr(device, "name", lambda index: "NVIDIA Pretended")
        monkeypatch.setattr(device, "sm_count", lambda index: 100)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        for cached in (cards._on, log.warn_once):
            cached.cache_clear()

    return become


@pytest.fixture
def wheel_of_all(tmp_path: Path, entries_folder: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a wheel with a library for each architecture, whose kernels return their place in ``GPUS``."""
    folder = tmp_path / "_lib"
    monkeypatch.setattr(packaged, "FOLDER", folder)
    for number, arch in enumerate(specs.ARCHITECTURES):
        spec = tuning.gathered(torch.bfloat16, 1, family=specs.ARCHITECTURES[arch])
        package_tiny(packaged.folder_of(arch), spec, number, arch=arch, toolkit="cu12")
    return folder


@every_gpu([(8, 6), (9, 0), (10, 3), (12, 0)])
def test_a_launch_loads_the_library_of_its_architecture_alone(
    capability: Capability, gpu: Callable[[Capability], None], wheel_of_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(capability)
    arch = GPUS[capability]
    assert arch is not None
    assert resolve.require_architecture(0) == arch
    assert tuning.family(0) == specs.ARCHITECTURES[arch]
    opened: list[Path] = []
    load = packaged.load
    monkeypatch.setattr(packaged, "load", lambda path, symbol: opened.append(path) or load(path, symbol))  # type: ignore[func-returns-value]
    spec = tuning.gathered(torch.bfloat16, 1, family=tuning.family(0))
    assert resolve.launchable(0, spec)
    assert resolve.resolve(spec, arch)() == list(specs.ARCHITECTURES).index(arch)  # type: ignore[func-returns-value]
    assert set(opened) == {packaged.folder_of(arch) / packaged.LIBRARY}
    there = device.Device(0, "NVIDIA Pretended", capability, 100, 80 << 30)
    monkeypatch.setattr(device, "describe", lambda: device.Driver((13, 0), (there,)))
    state = info.collect()
    assert [state["kernels"][name] for name in ("arch", "loads", "problems")] == [arch, True, []]
    assert set(state["kernels"]["packaged"]) == set(specs.ARCHITECTURES)


def test_a_wheel_for_other_gpus_says_what_to_install(
    gpu: Callable[[Capability], None],
    wheel_of_all: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Kernels compile into the cache, apart from those for other architectures."""
    gpu((8, 0))
    shutil.rmtree(packaged.folder_of("sm_80"))
    packaged.read_manifest.cache_clear()
    spec = tuning.gathered(torch.bfloat16, 1, family=tuning.family(0))
    resolve.resolve(spec, "sm_80")
    assert compiler.compiled == [spec.symbol]
    assert [path.name for path in (wheel_of_all.parent / "cache").iterdir()] == [cache.fingerprint("sm_80")]
    assert len({cache.fingerprint(arch) for arch in specs.ARCHITECTURES}) == len(specs.ARCHITECTURES)
    advice = (
        "the installed kernels are for sm_90a, sm_100, sm_120, and this GPU needs sm_80: in a checkout "
        "`make wheel ARCHITECTURES=sm_80` builds a wheel with them; the extra jit compiles each at its first call"
    )
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [advice]
    other = tuning.gathered(torch.float16, 1, family=tuning.family(0))
    monkeypatch.setattr(cache, "kernel_module", lambda name: importlib.import_module("no_compiler"))
    with pytest.raises(RuntimeError, match=f"cannot be compiled: .*; {re.escape(advice)}"):
        resolve.resolve(other, "sm_80")
    there = device.Device(0, "NVIDIA Pretended", (8, 0), 100, 80 << 30)
    monkeypatch.setattr(device, "describe", lambda: device.Driver((13, 0), (there,)))
    state = info.collect()
    assert not state["kernels"]["usable"]
    said = "\n".join(info.lines(state))
    assert re.search(r"packaged\n +sm_90a\n +sm_100\n +sm_120\n", said)
    assert advice in said


def test_older_gpus_are_refused(gpu: Callable[[Capability], None], compiler: Compiler) -> None:
    gpu((7, 5))
    with pytest.raises(
        NotImplementedError, match=r"need compute capability 8\.x, 9\.x, 10\.x or 12\.x, got 7\.5 on cuda:0; use"
    ):
        program.launch(tuning.unpack(torch.bfloat16))
    gpu((11, 0))
    with pytest.raises(NotImplementedError, match=r"10\.x or 12\.x, got 11\.0 on cuda:0"):
        resolve.require_architecture(0)
    assert not resolve.launchable(0, tuning.unpack(torch.bfloat16))
    assert not compiler.compiled
    for capability, arch in GPUS.items():
        gpu(capability)
        assert device.architecture(0) == arch


@every_gpu([(7, 5), (8, 9), (9, 0), (12, 0)])
def test_auto_is_dense_without_a_table(
    capability: Capability,
    gpu: Callable[[Capability], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one warning that says why; a table of `twell tune` is enough, and 9.0 has the shipped one."""
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    gpu(capability)
    with caplog.at_level(logging.WARNING, "twell"):
        found = [cards.imposed_on_call("cuda", 0) for _ in range(2)]
    assert [not why for why in found] == [capability == (9, 0)] * 2
    assert len(caplog.records) == (capability != (9, 0))
    named = f"NVIDIA Pretended (compute capability {NAMES[capability]})"
    reason = f"rates of the sparse kernels are not known on {named}; `twell tune` measures them"
    if GPUS[capability] is None:
        reason = f"there are no sparse kernels for {named}, only for 8.x, 9.x, 10.x, 12.x"
    said = f'strategy="auto" is "dense": {reason}'
    assert all(record.getMessage() == said for record in caplog.records)
    # the reason that ``explain`` gives
    assert cards.imposed("cuda", 0) == reason * (capability != (9, 0))
    assert cards.imposed("cpu", None) == cards.imposed("meta", None)
    machine = "NVIDIA Pretended (100 SMs, 80 GiB); driver 580"
    tmp_path.chmod(0o700)
    cards.write(dataclasses.replace(cards.SHIPPED, machine=machine))
    gpu(capability)
    assert cards.imposed_on_call("cuda", 0).endswith("12.x") == (GPUS[capability] is None)


@every_gpu([(8, 0), (9, 0)])
def test_auto_keeps_to_what_the_family_takes(capability: Capability, gpu: Callable[[Capability], None]) -> None:
    """Neurons beyond the hybrid format's of the portable family leave "row" and dense."""
    gpu(capability)
    card = cards.in_use(torch.device("cuda", 0))
    assert card.union_neurons == (65536 if capability == (9, 0) else geometry.PORTABLE_UNION_NEURONS)
    assert card.screens == (capability == (9, 0))
    for n in (geometry.PORTABLE_UNION_NEURONS, geometry.PORTABLE_UNION_NEURONS + 8):
        taken = n <= card.union_neurons
        for training in (False, True):
            problem = rates.Problem(16384, 2048, n, True, training)
            assert ("union" in rates.seconds(problem, rates.Figures(1.0, 0.01), card)) == taken
            decision = rates.decide(problem, rates.Figures(1.0, 0.01), None, card)
            assert decision.strategy == ("union" if taken else "dense" if training else decision.strategy)
            assert taken or decision.strategy != "union"


# The portable family


@pytest.mark.parametrize("arch", specs.ARCHITECTURES)
def test_every_architecture_has_its_family(arch: str) -> None:
    shipped = catalog.of_architecture(arch)
    assert {getattr(spec, "family", specs.ARCHITECTURES[arch]) for spec in shipped} == {specs.ARCHITECTURES[arch]}
    assert specs.UnpackSpec("bfloat16") in shipped


def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The tokens, K and neurons of each product that fills a gate from now on; its bits are those of F.linear."""
    made: list[tuple[int, ...]] = []
    own = gate_pack._project

    def project(x: Tensor, w_gate: Tensor, b_gate: Tensor | None, gate: Tensor) -> None:
        own(x, w_gate, b_gate, gate)
        assert torch.equal(gate, F.linear(x, w_gate, b_gate))
        made.append((*x.shape, len(w_gate)))

    monkeypatch.setattr(gate_pack, "_project", project)
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n", [512, 264])
def test_the_gate_is_pytorchs_contiguous_product(n: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product of all tokens, in front of one kernel, in each kind of pass; in the spill if it is as wide."""
    gpu = fake_gpu.install(monkeypatch, specs.PORTABLE)
    made = products(monkeypatch)
    x, w_gate, w_up, w_down = (torch.randn(s, 64).bfloat16() for s in (300, n, n, n))
    b_gate = torch.randn(n).bfloat16() if bias else None
    words, spill, stats = gate_pack._cuda(x, w_gate, b_gate, 8)
    assert (made, gpu.names()) == ([(300, 64, n)], ["pack"])
    (_, (gate, own_words, own_spill, own_stats, *_)), *_ = gpu.launches
    assert torch.equal(gate, F.linear(x, w_gate, b_gate))
    assert gate.is_contiguous()
    assert (gate.data_ptr() == spill.data_ptr()) == (n == 512)
    for own, other in ((own_words, words), (own_spill, spill), (own_stats, stats)):
        assert own.data_ptr() == other.data_ptr()
    layer = x, w_gate, w_up, w_down, b_gate, None, None
    for run, names in (
        (lambda: programs.union_layer((x, w_gate, w_up, w_down, b_gate)), ["pack", "compact"]),
        (lambda: hybrid_forward._cuda(*layer, 8, 0, "relu", 0.0, False, None), ["pack"]),
    ):
        made.clear()
        gpu.clear()
        run()
        assert made == [(300, 64, n)]
        assert gpu.names()[: len(names)] == names


def test_products_of_an_invariant_gate_have_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of tokens is padded to it, so a library takes the same kernel for each."""
    fake_gpu.install(monkeypatch, specs.PORTABLE)
    made = products(monkeypatch)
    w_gate = torch.randn(264, 64).bfloat16()
    for m in (1, 128, 300):
        x, gate = torch.randn(m, 64).bfloat16(), torch.full((m, 512), float("nan")).bfloat16()
        gate_pack._project_invariantly(x, w_gate, None, gate[:, :264])
        assert torch.equal(gate[:, :264], F.linear(x, w_gate))
        assert gate[:, 264:].isnan().all()
        layer = Layer(x, w_gate, None, w_gate.t())
        twell_ffn.on_cuda(layer, 8, RELU, Route("row", invariant=True), False)
        assert set(made) == {(128, 64, 264)}


def test_more_neurons_than_shared_memory_holds_are_refused() -> None:
    most = geometry.PORTABLE_UNION_NEURONS
    hybrid.require_neurons(most, specs.PORTABLE, "training")
    hybrid.require_neurons(65536, specs.SM90, "training")
    message = f"training takes at most {most} neurons on GPUs of .*, got {most + 8}; use"
    with pytest.raises(NotImplementedError, match=message):
        hybrid.require_neurons(most + 8, specs.PORTABLE, "training")
