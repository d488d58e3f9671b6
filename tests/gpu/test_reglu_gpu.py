"""``relu(gate) * up`` in one kernel, its gradients in another: torch's bits, and the memory of dense layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activations import DTYPES, dense_layer, plain, same_bits
from torch import Tensor

import twell
from twell import ops, testing
from twell.base.activation import RELU
from twell.call import autograd
from twell.choose import tuning
from twell.ops.reglu import on_cuda as reglu_on_cuda
from twell.runtime import program

BF16 = torch.bfloat16
# a dense layer of many tokens is fused; the neurons are no multiple of eight
M, K, N = 8192, 264, 1035


def torchs(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (gate, up)]
    hidden = plain(*leaves)
    return (hidden.detach(), *torch.autograd.grad(hidden, leaves, dh))


def ours(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return (ops.reglu(gate, up), *ops.reglu_backward(dh, gate, up))


def check(dh: Tensor, gate: Tensor, up: Tensor) -> None:
    for name, a, b in zip(("hidden", "d_gate", "d_up"), ours(dh, gate, up), torchs(dh, gate, up), strict=True):
        assert same_bits(a, b), name


def random(*shape: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    dh, gate, up = (torch.randn(shape, device="cuda").to(dtype) for _ in range(3))
    return dh, gate, up


@DTYPES
def test_sizes_and_shapes(dtype: torch.dtype) -> None:
    sizes = (0, 1, 7, 8, 9, 4095, 4096, 8191, 8192, 8193, 16384 + 7, 1 << 20, (1 << 20) + 5)
    for shape in (*((size,) for size in sizes), (), (1, 1), (3, 0, 5), (2, 3, 5), (1021, 1035)):
        check(*random(*shape, dtype=dtype))
        assert ops.reglu(*random(*shape)[1:]).shape == shape


def test_nothing_else_is_written() -> None:
    """The kernels, given parts of a larger tensor, leave the rest of it alone."""
    for size in (1, 7, 8, 9, 4099, 8192, 8195):
        dh, gate, up = random(size)
        for backward in (False, True):
            spare = [torch.full((size + 8200,), 7.0, dtype=BF16, device="cuda") for _ in range(1 + backward)]
            sources = (dh, gate, up) if backward else (gate, up)
            rows = () if backward else (size, 0)
            program.launch(tuning.reglu(BF16, backward=backward), *sources, *(t[:size] for t in spare), *rows, 0, 0)
            expected = torchs(dh, gate, up)[1:] if backward else torchs(dh, gate, up)[:1]
            for t, right in zip(spare, expected, strict=True):
                assert same_bits(t[:size], right)
                assert bool((t[size:] == 7).all())


@pytest.mark.parametrize("shape", [(0,), (1,), (9,), (8193,), (1021, 1035), (1 << 20, 8)])
def test_the_result_may_take_the_memory_of_up(shape: tuple[int, ...]) -> None:
    for view in (lambda t: t, lambda t: t.mT if t.dim() == 2 else t[:-1]):
        _, gate, up = (view(t) for t in random(*shape))
        expected, before = plain(gate, up), up.clone()
        hidden = reglu_on_cuda(gate, up, inplace=True)
        assert same_bits(hidden, expected)
        if up.is_contiguous() and up.numel():
            assert hidden.data_ptr() == up.data_ptr()
        else:
            assert same_bits(up, before)


def memory(call: Callable[[], Any]) -> int:
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_dense_inference_holds_two_values_per_neuron() -> None:
    """Gate and up, never a third tensor of that size: not more memory than compiled PyTorch takes."""
    m, k, n = 4096, 256, 4096
    p = [torch.randn(shape, device="cuda").to(BF16) for shape in ((m, k), (n, k), (n, k), (k, n))]
    with torch.no_grad():
        for call in (
            lambda: twell.sparse_gated_ffn(*p, strategy="dense"),
            lambda: ops.ffn(*p[:3], p[3].t(), None, None, None, 8, "dense", None),
        ):
            assert memory(call) < 2 * m * n * 2 + 4 * m * k * 2


@DTYPES
@pytest.mark.parametrize(("m", "n"), [(1, 8), (2, 8), (3, 264), (257, 1032), (8191, 40)])
def test_halves_of_one_product(m: int, n: int, dtype: torch.dtype) -> None:
    """Rows that lie apart are read in place: the values between them would change a result."""
    merged = torch.randn(m, 2 * n + 16, device="cuda").to(dtype)
    for gate, up in ((merged[:, :n], merged[:, n : 2 * n]), (merged[:, 8 : n + 8], merged[:, n + 16 :])):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        hidden = ops.reglu(gate, up)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
        assert hidden.is_contiguous()
        assert same_bits(hidden, plain(gate, up))


@pytest.mark.slow
@pytest.mark.parametrize("rest", [0, 8 * 8191 + 3])
def test_beyond_32_bits(rest: int) -> None:
    """More than 2^31 elements, and more than 2^32 bytes, compared in parts."""
    if torch.cuda.mem_get_info()[1] < 60e9:
        pytest.skip("needs a GPU with 60 GB")
    torch.cuda.empty_cache()
    size, part = (1 << 31) + (1 << 20) + rest, 1 << 26
    dh, gate, up = (torch.empty(size, dtype=BF16, device="cuda") for _ in range(3))
    for t in (dh, gate, up):
        for piece in t.split(part):
            piece.normal_()
    results = ours(dh, gate, up)
    for pieces in zip(*(t.split(part) for t in (dh, gate, up, *results)), strict=True):
        for a, b in zip(pieces[3:], torchs(*pieces[:3]), strict=True):
            assert same_bits(a, b)
    del results, dh, gate, up
    torch.cuda.empty_cache()


# Dense layers


def by_hand_y(p: testing.FFN) -> Tensor:
    hidden = F.relu(F.linear(p.x, p.w_gate, p.b_gate)) * F.linear(p.x, p.w_up, p.b_up)
    return F.linear(hidden, p.w_down.t(), p.b_down)


def test_training_takes_no_more_memory_than_plain_pytorch() -> None:
    """At the peak, and kept for backward."""
    shapes = ((M, K), (N, K), (N, K), (N, K), (N,), (N,), (K,))
    p = testing.FFN(*((torch.randn(shape, device="cuda") / 4).to(BF16).requires_grad_() for shape in shapes))
    peaks, kept = [], []
    for f in (dense_layer, by_hand_y):

        def step(f: Callable[..., Tensor] = f) -> None:
            y = f(p)
            torch.autograd.grad(y, tuple(p), torch.ones_like(y))

        peaks.append(memory(step))
        before = torch.cuda.memory_allocated()
        y = f(p)
        kept.append(torch.cuda.memory_allocated() - before)
        del y
    assert autograd.fuses(torch.empty(M, N, dtype=BF16, device="cuda"), RELU, p.map(Tensor.detach))
    assert peaks[0] <= peaks[1]
    assert kept[0] <= kept[1]
