"""The screened gate of few tokens: the operator is ``gate_pack``, and layers take it where a kept copy pays for it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import twell
from twell import _gate_copies, ops, testing, tuning
from twell._activation import activation_of
from twell._runtime import device
from twell.ops.operands import Operands

FFN: Any = sys.modules["twell.ops.ffn"]
BF16 = torch.bfloat16
# the least layer that is screened for few tokens has 40 million values
K, N = 4096, 9768


@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("biases", ["", "gate"])
@pytest.mark.parametrize("m", [0, 1, 3, 8])
def test_it_is_gate_pack(m: int, biases: str, dtype: torch.dtype, nearest: bool) -> None:
    for k, n, density in ((8, 8, 0.5), (72, 520, 0.02), (1032, 264, 1.0), (64, 256, 0.0)):
        p = testing.integer_problem(m, k, n, density=density, biases=biases, dtype=dtype)
        quantized = ops.quantize_gate(p.w_gate, True, nearest)
        for threshold in (0.0, 1.5):
            found = ops.gate_pack_screened(p.x, p.w_gate, p.b_gate, *quantized, 8, threshold, nearest)
            testing.assert_packed_same(found, ops.gate_pack(p.x, p.w_gate, p.b_gate, 8, threshold), n, 8)


def test_neurons_that_are_no_candidates_are_not_read() -> None:
    """A gate is 0 where the int8 rows say so: those of another weight."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 256).to(BF16), torch.randn(520, 256).to(BF16)
    quantized = ops.quantize_gate(w, True)
    candidates = ops.gate_screen(*ops.quantize_gate(x, False), *quantized, torch.empty(0, dtype=BF16))
    listed = (candidates[0, :, None] >> torch.arange(32) & 1).bool().flatten()[:520]
    assert 0 < listed.sum() < 520
    words, spill, _ = ops.gate_pack_screened(x, x.new_full((520, 256), torch.nan), None, *quantized, 8)
    gate = ops.unpack(words, spill, 520, 8)
    assert gate[:, listed].isnan().all()
    assert not gate[:, ~listed].any()


def test_tokens_that_are_not_finite_have_all_candidates() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(3, 64).to(BF16), torch.randn(40, 64).to(BF16)
    quantized = ops.quantize_gate(w, True)
    for value in (torch.nan, torch.inf, -torch.inf, 3e38):
        x[1, 7] = value
        for a, b in zip(ops.gate_pack_screened(x, w, None, *quantized, 8), ops.gate_pack(x, w, None, 8)):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_it_refuses_and_is_an_operator() -> None:
    p = testing.integer_problem(8, 72, 520, density=0.02, biases="gate")
    q, scale, *others = ops.quantize_gate(p.w_gate, True)
    torch.library.opcheck(ops.gate_pack_screened, (p.x, p.w_gate, p.b_gate, q, scale, *others, 8))
    torch.library.opcheck(ops.gate_pack_screened, (p.x[:0], p.w_gate, None, q, scale, *others, 4, 0.5))
    for arguments, error, message in (
        ((p.x.new_zeros(9, 72), p.w_gate, None, q, scale), ValueError, r"x must have at most 8 rows, got \[9, 72\]"),
        ((p.x, p.w_gate, None, q, scale[1:]), ValueError, r"scale must be \[520\], got \[519\]"),
        ((p.x, p.w_gate, None, q.int(), scale), TypeError, r"q must be torch\.int8, got torch\.int32"),
        ((p.x, p.w_gate, p.b_gate[1:], q, scale), ValueError, r"b_gate must be \[520\], got \[519\]"),
    ):
        with pytest.raises(error, match=message):
            ops.gate_pack_screened(*arguments, *others, 8)


@pytest.mark.parametrize(
    ("m", "k", "n", "screened"),
    [
        (1, 4096, 14336, True),
        (8, 4096, 14336, True),
        (9, 4096, 14336, False),
        (0, 4096, 14336, False),
        (1, 4096, 11008, True),
        (1, 2048, 5632, False),
        (1, 16384, 53248, True),
        # no int8 rows of this length
        (1, 16392, 53248, False),
    ],
)
def test_few_tokens_of_large_layers_are_screened(m: int, k: int, n: int, screened: bool) -> None:
    assert tuning.screens_few(m, k, n) is screened


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that the CUDA implementations launch, called on CPU tensors, as on a GPU of 132 SMs."""
    found: list[str] = []
    monkeypatch.setattr(device, "sm_count", lambda index: 132)
    monkeypatch.setattr(device, "capability", lambda index: device.SM_90)
    for name in ("gate_pack", "gate_pack_screened", "up_down", "quantize_gate", "gate_screen", "screened", "library"):
        monkeypatch.setattr(sys.modules[f"twell.ops.{name}"], "launch", lambda spec, *_: found.append(spec.op))
    return found


def run(strategy: str, layer: Operands) -> None:
    FFN._SPARSE_ON_CUDA[strategy](layer, 8, activation_of("relu"), False)


def layer_of(m: int, k: int = K, n: int = N) -> Operands:
    return Operands(torch.zeros(m, k, dtype=BF16), *(torch.zeros(n, k, dtype=BF16) for _ in range(3)))


def test_few_tokens_read_a_kept_copy_alone(launched: list[str]) -> None:
    layer, few, plain = layer_of(3), ["quantize_gate", "gate_pack_screened"], ["gate_pack_few"]
    for strategy in ("row", "screened"):
        run(strategy, layer)
        assert launched == [*plain, "up_down_token"], "no copy is kept"
        launched.clear()
    copy = _gate_copies.GateCopy()
    _gate_copies.enroll(layer.w_gate, copy)
    run("row", layer)
    # the first call makes it
    assert launched == ["quantize_gate", *few, "up_down_token"]
    for strategy, expected in (("row", few), ("screened", few), ("invariant", ["gate_pack"])):
        launched.clear()
        run(strategy, layer)
        assert launched == [*expected, "up_down_token"]
    launched.clear()
    run("row", layer._replace(x=torch.zeros(9, K, dtype=BF16)))
    assert "gate_pack_screened" not in launched
    launched.clear()
    layer.w_gate.add_(1)
    run("row", layer)
    assert launched == ["quantize_gate", *few, "up_down_token"], "the weight was written"


def test_small_layers_keep_no_copy_for_few_tokens(launched: list[str]) -> None:
    layer = layer_of(1, 512, 1024)
    copy = _gate_copies.GateCopy()
    _gate_copies.enroll(layer.w_gate, copy)
    run("row", layer)
    assert launched == ["gate_pack_few", "up_down_token"]
    assert copy.nbytes == 0


@pytest.mark.parametrize("screen", ["screened", "proven"])
def test_tiles_of_128_tokens_are_not_for_few(screen: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 64 tokens run by "row", in layers of all sizes and with a kept copy, too."""
    layer = layer_of(64, 512, 1024)
    copy = _gate_copies.GateCopy()
    _gate_copies.enroll(layer.w_gate, copy)
    run(screen, layer)
    assert launched == ["gate_pack_few", "up_down_token"]
    launched.clear()
    monkeypatch.setattr(FFN, "screened_on_cuda", lambda *_: launched.append("tiles"))
    run(screen, layer._replace(x=torch.zeros(65, 512, dtype=BF16)))
    assert launched == ["quantize_gate", "tiles"]


def test_the_portable_family_is_not_screened(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "capability", lambda index: (8, 0))
    layer, copy = layer_of(1), _gate_copies.GateCopy()
    _gate_copies.enroll(layer.w_gate, copy)
    run("row", layer)
    assert launched == ["gate_pack_few", "up_down_token"]


def test_a_graph_reads_the_copy_that_was_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not made under capture, is not read if the weight has changed since, and stays as long as its holder."""
    weight, copy = torch.zeros(8, 16, dtype=BF16), _gate_copies.GateCopy()
    make = lambda nearest: ops.quantize_gate(weight, True, nearest)  # noqa: E731

    def captured(on: bool) -> Any:
        monkeypatch.setattr(_gate_copies, "_captures", lambda weight: on)
        return copy.for_few(weight, None, make)

    def of_many() -> Any:
        return copy.of(weight, "screened", lambda: make(False))

    assert captured(True) is None
    assert of_many() is not of_many(), "each replay makes its own"
    made, nearest = captured(False)
    assert not nearest
    for _ in range(3):
        assert captured(True)[0] is made
        assert of_many() is made
    assert copy.for_few(weight, "proven", make) is None
    weight.add_(1)
    assert captured(True) is None
    assert of_many() is not made
    assert captured(False)[0] is not made
    (kept,) = copy._captured
    assert kept is made
    with torch.inference_mode():
        assert copy.for_few(torch.zeros(8, 16, dtype=BF16), None, make) is None


@pytest.mark.parametrize(
    ("strategy", "few"),
    [
        ("row", "screened"),
        ("screened", "screened"),
        ("proven", "proven"),
        ("auto", "screened"),
        (twell.AutoStrategy(screen="proven"), "proven"),
        (twell.AutoStrategy(screen="off"), ""),
    ],
)
def test_a_layers_strategy_says_which_screen_its_few_tokens_have(strategy: Any, few: str) -> None:
    module = twell.nn.SparseGatedMLP(16, 8, strategy=strategy, dtype=BF16).requires_grad_(False)
    twell.nn.keep_gate_copies(module)
    module(torch.zeros(1, 16, dtype=BF16))
    assert module._gate_copy.few == few
    found = _gate_copies.for_few(
        module.gate_proj.weight, None, lambda nearest: ops.quantize_gate(torch.zeros(8, 16, dtype=BF16), True, nearest)
    )
    assert (found is None) == (few == "")
    assert found is None or found[1] == (few == "proven")
