"""Gradients of the sparse path on the CPU: right, as close to float64 as dense PyTorch's, and PyTorch citizens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import twell
from twell import testing
from twell.nn.layers import SparseGatedMLP, SparseMLP

BF16 = torch.bfloat16
Loss = Callable[[Tensor, twell.Aux], Tensor]


gated = partial(testing.sparse_layer, strategy="row")
plain = partial(testing.sparse_layer, gated=False, strategy="row")
BOTH = pytest.mark.parametrize("ffn", [gated, plain])
Function = Callable[..., tuple[Tensor, twell.Aux]]


def draw(m: int, n: int, k: int, bias: bool = False, shift: float = -1.3, dtype: torch.dtype = BF16) -> testing.FFN:
    """Normal values; ``shift`` moves all gates. Leaves that require grad."""
    w = [torch.randn(n, k) / k**0.5 for _ in range(2)]
    down = torch.randn(n, k) / n**0.5
    x = torch.randn(m, k)
    x[:, 0], w[0][:, 0] = 1.0, shift
    biases = (torch.randn(n) / 4, torch.randn(n), torch.randn(k)) if bias else (None, None, None)
    return testing.FFN(x, *w, down, *biases).map(lambda t: t.to(dtype).requires_grad_())


def leaves(p: testing.FFN, ffn: Function) -> dict[str, Tensor]:
    own = {name: t for name, t in p._asdict().items() if t is not None}
    return own if ffn is gated else {name: t for name, t in own.items() if name not in ("w_up", "b_up")}


def weighted(dy: Tensor) -> Loss:
    """A loss with the upstream gradient ``dy`` [..., K], and one of the l1 figure."""
    return lambda y, aux: (y * dy.to(y.dtype)).double().sum() + 0.3 * aux.l1


def grads(ffn: Function, p: testing.FFN, loss: Loss, **options: Any) -> dict[str, Tensor]:
    own = leaves(p, ffn)
    found = torch.autograd.grad(loss(*ffn(p, **options)), tuple(own.values()), allow_unused=True)
    return dict(zip(own, found, strict=True))


# Right


# Work


class Recorder(TorchDispatchMode):
    """A mode that records calls of this package's operators with their flags."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "twell":
            self.calls.append((function._opname, *(a for a in args if isinstance(a, bool))))
        return function(*args, **(kwargs or {}))


def test_saved_tensors_stay_within_their_size() -> None:
    """Beside operands at most 1.1 KB per token at 5632 neurons, and no words or spill."""
    p = draw(128, 5632, 64, shift=-3.0)
    operands = {t.data_ptr() for t in p if t is not None}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() not in operands:
            kept[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        gated(p)
    assert 0 < sum(kept.values()) / 128 <= 1.1 * 1024 + 5632 * 4 / 128


# PyTorch's rules


def loss_and_problem(ffn: Function) -> tuple[testing.FFN, Loss, dict[str, Tensor]]:
    p = draw(9, 264, 32, bias=True)
    loss = weighted(torch.randn(9, 32))
    return p, loss, grads(ffn, p, loss)


# Gradients that go into float32 tensors


def mains_of(p: testing.FFN, ffn: Function, layout: str) -> tuple[Tensor, ...]:
    """Twos of the weights' shapes: the down weight's as the transposed view of rows, or contiguous [K, N]."""
    n, k = p.w_gate.shape
    down = torch.full((n, k), 2.0).t() if layout == "rows" else torch.full((k, n), 2.0)
    return (*(torch.full((n, k), 2.0) for _ in range(2 if ffn is gated else 1)), down)


@pytest.mark.parametrize(("ffn", "backend"), [(plain, "aot_eager"), (gated, "inductor")])
def test_main_gradients_of_a_graph_may_lie_anywhere(ffn: Function, backend: str) -> None:
    """A graph that was traced with tensors at the beginning of their storage runs with views of one buffer, too."""
    p, loss, _ = loss_and_problem(ffn)
    torch.compiler.reset()
    step = torch.compile(lambda p, m: loss(*ffn(p, main_grads=m)), backend=backend)
    for first in (0, 64, 4096):
        apart = mains_of(p, ffn, "linear")
        loss(*ffn(p, main_grads=apart)).backward()
        buffer = torch.full((first + sum(t.numel() for t in apart),), 2.0)
        parts = buffer[first:].split([t.numel() for t in apart])
        step(p, tuple(part.view(t.shape) for part, t in zip(parts, apart))).backward()
        for part, t in zip(parts, apart):
            torch.testing.assert_close(part.view(t.shape), t)


@BOTH
def test_main_gradients_and_saved_tensor_hooks(ffn: Function) -> None:
    """They reach the caller's tensors, not copies."""
    p, loss, _ = loss_and_problem(ffn)
    expected, mains = mains_of(p, ffn, "rows"), mains_of(p, ffn, "rows")
    loss(*ffn(p, main_grads=expected)).backward()
    with torch.autograd.graph.save_on_cpu():
        total = loss(*ffn(p, main_grads=mains))
    total.backward()
    for main, answer in zip(mains, expected, strict=True):
        testing.assert_same(main, answer)


WAYS: dict[str, tuple[Callable[[Tensor, dict[str, Tensor]], Any], str]] = {
    "backward twice": (lambda total, own: (total.backward(retain_graph=True), total.backward()), "w_gate w_up w_down"),
    "backward into x": (lambda total, own: total.backward(inputs=[own["x"]]), ""),
    "backward into two": (lambda total, own: total.backward(inputs=[own["x"], own["w_down"]]), "w_down"),
    "grad of biases": (lambda total, own: torch.autograd.grad(total, [own["b_gate"], own["b_down"]]), ""),
    "grad of a weight": (
        lambda total, own: torch.autograd.grad(total, [own["x"], own["w_gate"]], allow_unused=True),
        "w_gate",
    ),
}


@BOTH
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("strategy", "around"),
    [("union", ""), ("dense", ""), ("union", "checkpoint"), ("union", "weights that were computed")],
)
def test_main_gradients_are_added_to_where_a_backward_pass_wants_them(
    ffn: Function, strategy: str, way: str, around: str
) -> None:
    p, loss, _ = loss_and_problem(ffn)
    own = leaves(p, ffn)
    weights = [name for name in ("w_gate", "w_up", "w_down") if name in own]

    def total(mains: tuple[Tensor, ...]) -> Tensor:
        def call(x: Tensor) -> Tensor:
            q = p._replace(x=x)
            if around == "weights that were computed":
                q = q._replace(**{name: own[name] * 1 for name in weights})
            return loss(*ffn(q, strategy=strategy, main_grads=mains))

        return checkpoint(call, p.x, use_reentrant=False) if around == "checkpoint" else call(p.x)

    whole, mains = (tuple(main.zero_() for main in mains_of(p, ffn, "rows")) for _ in range(2))
    total(whole).backward()
    run, wanted = WAYS[way]
    with Recorder() as recorder:
        run(total(mains), own)
    for name, main, answer in zip(weights, mains, whole, strict=True):
        assert answer.any()
        testing.assert_same(main, answer * (name in wanted) * (2 if "twice" in way else 1), name)
        assert own[name].grad is None
    if strategy == "union":
        # sums of fp32, not rounded to the weights' dtype
        assert not torch.equal(whole[0].to(BF16).float(), whole[0])
    fused = {name for name, *_ in recorder.calls} & {"hybrid_backward_accumulate", "hybrid_backward"}
    if strategy == "union" and wanted:
        assert fused == {"hybrid_backward_accumulate"}


@pytest.mark.parametrize(("taken", "strategy"), [(0, "union"), (1, "dense"), (2, "union"), (None, "union")])
def test_main_gradients_that_share_memory_with_what_autocast_copies_are_refused(strategy: str, taken: Any) -> None:
    """The caller's tensors are compared."""
    p = draw(2, 24, 16, dtype=torch.float32)
    weights = (p.w_gate, p.w_up, p.w_down.t())
    mains = [None if i != taken else weight.detach() for i, weight in enumerate(weights)]
    if taken is None:
        mains[1] = torch.cat([p.x.detach()] * 12).as_strided((24, 16), (16, 1))
    with torch.autocast("cpu", BF16):
        if taken is None:
            gated(p, main_grads=mains, strategy=strategy)
        else:
            with pytest.raises(ValueError, match="main_grads must have memory of their own, got main_grads for w_"):
                gated(p, main_grads=mains, strategy=strategy)


@pytest.mark.parametrize(
    ("cls", "strategy", "backend"),
    [(SparseGatedMLP, "auto", None), (SparseMLP, "union", "aot_eager"), (SparseGatedMLP, "dense", "aot_eager")],
)
def test_weights_that_want_to_know_of_their_main_gradients(cls: Any, strategy: Any, backend: str | None) -> None:
    """Megatron's data parallel waits for each gradient by hooks, and asks whether it has been added already."""
    mlp = cls(32, 264, dtype=BF16, strategy=strategy)
    weights: dict[str, Any] = dict(mlp.named_parameters())
    x, found = torch.randn(9, 32).to(BF16), []

    def ready(weight: Any) -> None:
        assert not weight.grad.any()
        found.append((weight.grad_added_to_main_grad, weight.main_grad.clone()))
        weight.grad = None

    for weight in weights.values():
        weight.main_grad = torch.zeros(weight.shape)
    torch.compiler.reset()
    mlp.accumulate_main_grad = True
    step: Any = mlp if backend is None else torch.compile(mlp, backend=backend, fullgraph=True)
    step(x).float().sum().backward()
    expected = [weight.main_grad.clone() for weight in weights.values()]
    assert all(weight.grad is None for weight in weights.values())
    for weight in weights.values():
        weight.main_grad.zero_()
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(ready)
    step(x).float().sum().backward()
    assert [told for told, _ in found] == [True] * len(weights)
    assert sorted(main.norm().item() for _, main in found) == sorted(main.norm().item() for main in expected)
    if backend is None:
        x.requires_grad_()
        weights["up_proj.weight"].grad_added_to_main_grad = False
        torch.autograd.grad(mlp(x).float().sum(), x)
        assert not weights["up_proj.weight"].grad_added_to_main_grad


@pytest.mark.parametrize("strategy", ["union", "dense"])
def test_an_input_that_is_changed_in_place(strategy: Any) -> None:
    """With frozen weights dense PyTorch does not read it again."""
    layer = SparseGatedMLP(32, 64, strategy=strategy, dtype=torch.bfloat16).requires_grad_(False)
    h = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True) * 1
    h += layer(h)
    if strategy == "dense":
        h.sum().backward()
    else:
        with pytest.raises(NotImplementedError, match=r"changed in place after the call: write h = h \+ layer\(h\)"):
            h.sum().backward()
