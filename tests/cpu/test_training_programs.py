"""The launches of training as data, without a GPU: which kernels get what, in which order and in how much memory."""

from collections.abc import Callable
from typing import Any

import fake_gpu
import pytest
import torch
from fake_gpu import FakeGpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import twell
from tests.cpu.test_hybrid import forward, parts, problem, upstream
from twell import ops, testing
from twell.base.activation import RELU, activation_of
from twell.call import autograd
from twell.ops import screened
from twell.ops.hybrid_backward import build
from twell.ops.hybrid_forward import forward_of
from twell.ops.operands import Form, made
from twell.runtime import geometry, resolve, specs

BF16 = torch.bfloat16
MULTIPLIED = ["sampled_up", "gathered", "overflow"]
SCREENED = ["quantize_gate", "quantize_gate", "gate_screen", "list_candidates", "sampled_gate", "compact", *MULTIPLIED]


def on_cuda(op: Any, arguments: tuple[Any, ...]) -> Any:
    return fake_gpu.on_cuda(op._opname, *arguments)


def arguments_of_all(p: testing.FFN) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return (operator, arguments) of the three operators; main tensors have three layouts."""
    *_, kept = forward(p)
    saved = (*upstream(p), *p[:6], kept)
    n, k = p.w_gate.shape
    mains = [torch.ones(n, k), None if p.w_up is None else torch.ones(k, n).t(), torch.ones(n, k + 8)[:, :k]]
    return [
        (ops.hybrid_forward, (*p, 8)),
        (ops.hybrid_backward, (*saved, True, True)),
        (ops.hybrid_backward_accumulate, (*saved, *mains, True)),
    ]


@pytest.fixture
def dispatched(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that the dispatcher is asked for, which run as it runs them on a GPU."""
    names: list[str] = []

    def asked(op: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            names.append(op._opname)
            with torch.no_grad():
                return on_cuda(op, arguments)

        return run

    for op in (ops.hybrid_forward, ops.hybrid_backward, ops.hybrid_backward_accumulate):
        monkeypatch.setattr(ops, op._opname, asked(op))
    return names


# The operators


def test_main_tensors_that_kernels_cannot_write_are_added_to_afterwards(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def adding(spec: specs.Spec, arch: str) -> Callable[..., None]:
        run = gpu.kernel(spec, arch)

        def add(*arguments: Any) -> None:
            run(*arguments)
            if spec.op == "weight_grad":
                for i, main in enumerate(arguments[13:16]):
                    main.add_(i + 1)

        return add

    monkeypatch.setattr(resolve, "_find", adding)
    _, (op, arguments) = arguments_of_all(problem(5, 264, 16, 0.1))[1:]
    on_cuda(op, arguments)
    assert [set(main.flatten().tolist()) for main in arguments[9:12]] == [{2.0}, {3.0}, {4.0}]


def test_a_missing_gradient_of_l1_is_a_zero_of_the_format(gpu: FakeGpu) -> None:
    p = problem(130, 264, 16, 0.1)
    *_, kept = forward(p)
    on_cuda(ops.hybrid_backward, (upstream(p)[0], None, *p[:6], kept, True, True))
    places = {"sampled_grad": 7, "overflow": 8}
    given = [arguments[places[spec.op]] for spec, arguments in gpu.launches if spec.op in places]
    assert len(given) == 2
    for dl1 in given:
        assert dl1.data_ptr() == parts(kept, p).chunks.data_ptr()
        assert (dl1.dtype, dl1.tolist()) == (torch.float32, [0.0])


# Steps


class Step:
    def __init__(self, shape: tuple[int, ...] = (130, 64), *, gated: bool = True, frozen: str = "") -> None:
        k, n = shape[-1], 264
        sizes = {"x": shape, "w_gate": (n, k), **({"w_up": (n, k)} if gated else {}), "w_down": (n, k)}
        given = {name: torch.zeros(size, dtype=BF16) for name, size in sizes.items()}
        given["w_down"] = given["w_down"].t()
        self.operands = {name: t.requires_grad_(name not in frozen.split()) for name, t in given.items()}
        self.gated = gated

    def forward(self, **options: Any) -> Any:
        function: Any = twell.sparse_gated_ffn if self.gated else twell.sparse_ffn
        return function(*self.operands.values(), strategy="union", **options)

    def __call__(self, **options: Any) -> None:
        y = self.forward(**options)
        y.backward(torch.ones_like(y))
        for name, operand in self.operands.items():
            assert (operand.grad is not None) == operand.requires_grad, name
            if operand.grad is not None:
                assert (operand.grad.shape, operand.grad.stride()) == (operand.shape, operand.stride()), name


def launches_of(gated: bool) -> list[str]:
    backward = ["sampled_grad", "gathered", "rank", "transpose", "weight_grad", "overflow"]
    return ["gate_pack", "compact", *MULTIPLIED[not gated :], *backward]


def test_a_screen_of_a_threshold_has_a_bias_of_its_own(gpu: FakeGpu) -> None:
    p = problem(130, 264, 16, 0.1, biases="gate")
    for name, threshold, biases in (("relu", 0.0, True), ("fatrelu", 1.0, True), ("fatrelu", 1.0, False)):
        gpu.clear()
        given = p if biases else p._replace(b_gate=None)
        on_cuda(ops.hybrid_forward, (*given, 8, 0, name, threshold, True))
        assert gpu.names() == SCREENED
        (bias,) = (arguments[8] for spec, arguments in gpu.launches if spec.op == "gate_screen")
        expected = screened.firing_bias(p.w_gate, given.b_gate, activation_of(name, threshold))
        assert torch.equal(bias, expected)
        assert (bias.data_ptr() == p.b_gate.data_ptr()) == (not threshold)


def test_operands_that_kernels_read_only_as_copies_go_the_long_way(
    gpu: FakeGpu, dispatched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators copy them, in forward and in backward."""
    seen = []
    original = autograd.passes_of
    monkeypatch.setattr(autograd, "passes_of", lambda *how: seen.append(original(*how)) or seen[-1])
    step = Step()
    for name, operand in step.operands.items():
        for misaligned in (False, True):
            if misaligned:
                flat = torch.zeros(operand.numel() + 1, dtype=BF16)[1:]
                other = flat.view(operand.t().shape).t() if name == "w_down" else flat.view(operand.shape)
            else:
                other = torch.zeros(*operand.shape, 2, dtype=BF16)[..., 0]
            gpu.clear()
            seen.clear()
            dispatched.clear()
            step.operands = {**step.operands, name: other.requires_grad_()}
            y = step.forward()
            y.backward(torch.ones_like(y))
            assert all(t.grad is not None and t.grad.shape == t.shape for t in step.operands.values())
            assert gpu.names() == launches_of(True)
            assert dispatched == ["hybrid_forward", "hybrid_backward"]
            assert (seen[0] is None) != misaligned, name
            step.operands[name] = operand


def test_the_sum_and_the_number_are_made_only_where_they_are_asked_for(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step()
    step()
    assert [len(made.operands) for made in gpu.programs[:2]] == [5, 6]
    gpu.clear()
    _, aux = step.forward(return_aux=True)
    assert (aux.l1.shape, aux.l0.dtype) == ((), torch.float32)
    assert [len(made.operands) for made in gpu.programs] == [6, 7]
    # a total of more than 32 bits is the sum of the statistics
    fake_gpu.forget_programs()
    monkeypatch.setattr(geometry, "MOST", 130 * 264 - 1)
    gpu.clear()
    step.forward(return_aux=True)
    assert [len(made.operands) for made in gpu.programs] == [7, 7]


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Other(Tensor):
    """A tensor of a class that may mean anything."""


def test_saved_tensors_that_hooks_changed(gpu: FakeGpu, dispatched: list[str]) -> None:
    """Plain ones of another place are taken; others go the long way, which makes plain ones of them or refuses."""
    step = Step()
    for unpack, expected in (
        (lambda t: t.clone(), []),
        (lambda t: t.double().to(t.dtype), []),
        (torch._neg_view, ["hybrid_backward"]),
        (lambda t: t.as_subclass(Other), ["hybrid_backward"]),
        (lambda t: torch.cat((t.flatten(), t.flatten()[:1]))[1:].view(t.shape), ["hybrid_backward"]),
    ):
        dispatched.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = step.forward()
        y.sum().backward()
        assert dispatched == expected


def test_backward_passes_that_are_more_than_one_of_plain_tensors(gpu: FakeGpu, dispatched: list[str]) -> None:
    step = Step(frozen="w_gate w_up w_down")
    x = step.operands["x"]
    y = step.forward()
    torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    assert dispatched == ["hybrid_backward"]
    for recording in (torch.profiler.profile, Mode):
        y, before = step.forward(), len(dispatched)
        with recording():
            torch.autograd.grad(y, x, torch.ones_like(y))
        assert len(dispatched) == before + 1
    y, before = step.forward(), len(dispatched)
    torch.autograd.grad(y, x, torch.ones_like(y))
    assert len(dispatched) == before


def test_gradients_into_mains_and_of_l1_alone_are_dispatched(gpu: FakeGpu, dispatched: list[str]) -> None:
    """Forward is direct, and backward runs the operator that adds, or that takes no gradient of y."""
    for shape in ((130, 64), (2, 65, 64)):
        dispatched.clear()
        step = Step(shape)
        mains = [torch.zeros(264, 64), None, torch.zeros(264, 64).t()]
        y = step.forward(main_grads=mains)
        y.backward(torch.ones_like(y))
        assert dispatched == ["hybrid_backward_accumulate"]
        assert [name for name, t in step.operands.items() if t.grad is None] == ["w_gate", "w_down"]
        _, aux = step.forward(return_aux=True)
        aux.l1.backward()
        assert dispatched[1:] == ["hybrid_backward"]
        assert step.operands["x"].grad.shape == shape


# Memory


@pytest.mark.parametrize(
    ("m", "before_forward", "before_backward"),
    [(2048, 34.2e6, 152.9e6), (16384, 273.7e6, 404.6e6)],
)
def test_peak_memory(gpu: FakeGpu, m: int, before_forward: float, before_backward: float) -> None:
    """Of results and scratch at the paper's size: not more than when tensors came and went one by one."""
    k, n = 2048, 5632
    rows = [(shape, (k, 1), BF16) for shape in ((m, k), (n, k), (n, k))]
    form = Form(0, (*rows, ((k, n), (1, k), BF16), None, None, None, None))
    whole = forward_of(form, 8, 0, RELU, False, False)
    assert whole is not None
    given = (rows[0], None, *form.places, whole.kept, *rows, rows[1], *[None] * 4)
    made(build, Form(0, given), RELU, False, 0)
    packing, multiplying, backward = gpu.programs
    # behind the layer come kept, y and the gradients
    first, second, last = (
        fake_gpu.room(packing, 4),
        fake_gpu.room(multiplying, 4, 5),
        fake_gpu.room(backward, 6, 7, 8, 9),
    )
    assert max(first, second) <= before_forward
    assert last <= before_backward
    # one that is not cut would hold y beside the packed gate
    assert max(first, second) < first + m * k * 2
