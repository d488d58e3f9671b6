"""torch's default device, which users may set, must not reach any tensor that twell makes."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ffns import Gated
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

import twell
from twell import ops, recipe, reference, testing
from twell.nn import SparseGatedMLP, SparseMLP

BF16 = torch.bfloat16
K, N = 16, 264
FACTORIES = {getattr(function, "__name__", "") for function in _device_constructors()}


@pytest.mark.parametrize("folder", ["python/twell", "examples", "profiling"])
def test_every_tensor_is_made_on_a_named_device(folder: str, root: Path) -> None:
    """A call without ``device`` would use the default device."""
    files = sorted((root / folder).rglob("*.py"))
    assert files
    found = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and (node.func.value.id, node.func.attr in FACTORIES) == ("torch", True)
                and not any(keyword.arg in ("device", None) for keyword in node.keywords)
            ):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    assert not found


def functions(strategy: str) -> list[Any]:
    p = testing.integer_problem(130, K, N, biases="gate up down")
    biases = {"b_gate": p.b_gate, "b_up": p.b_up, "b_down": p.b_down}
    results = []
    for training in (False, True):
        own = p.map(lambda t, training=training: t.clone().requires_grad_(training))
        y, aux = twell.sparse_gated_ffn(*own[:3], own.w_down.t(), **biases, strategy=strategy, return_aux=True)
        plain, _ = twell.sparse_ffn(own.x, own.w_gate, own.w_down.t(), strategy=strategy, return_aux=True)
        results += [y.detach(), plain.detach(), *(t.detach() for t in aux)]
        if training:
            mains = (torch.zeros(N, K, device="cpu"), None, None)
            (y.sum() + aux.l1 + plain.sum()).backward()
            twell.sparse_gated_ffn(*own[:3], own.w_down.t(), strategy=strategy, main_grads=mains).sum().backward()
            results += [*(t.grad for t in own[:4]), mains[0]]
    packed = twell.pack(p.x, p.w_gate, p.b_gate)
    return [*results, packed.words, packed.unpack(), packed.nnz()]


def overflow() -> list[Any]:
    p = testing.integer_problem(130, K, N, density=1.0)
    kept = ops.hybrid_forward(p.x, p.w_gate, p.w_up, p.w_down, None, None, None, 8)
    dy, dl1 = testing.integer_upstream(p), torch.zeros((), device="cpu")
    return [*kept, *ops.hybrid_backward(dy, dl1, p.x, p.w_gate, p.w_up, p.w_down, None, None, *kept[3:], True, True)]


def references() -> list[Any]:
    p = testing.integer_problem(3, K, 72)
    words, spill, stats = reference.gate_pack(p.x, p.w_gate, None, 8)
    dense = reference.unpack(words, spill, 72, 8)
    layer = (p.x, p.w_gate, p.w_up, p.w_down, None, None)
    dl1 = torch.ones((), device="cpu")
    return [
        *(words, stats, dense),
        reference.up_down(p.x, words, spill, p.w_up, p.w_down, None, None, 8),
        reference.up_down(None, words, spill, None, p.w_down, None, None, 8),
        reference.hybrid(dense),
        reference.hybrid(torch.ones_like(dense)),
        reference.hybrid_forward(*layer, None),
        reference.hybrid_backward(testing.integer_upstream(p), dl1, *layer),
    ]


def models() -> list[Any]:
    """Figures, dead neurons, compaction and recipes of an existing model."""
    model, x = copy.deepcopy(MODEL), testing.integer_problem(130, K, N).x
    recipe.record_aux(model)
    tracker = recipe.SparsityTracker(model, every=1, window=1)
    with tracker.watch(0), twell.count_firing(model) as firing:
        y = model(x)
    y.float().sum().backward()
    results = [
        y.detach(),
        recipe.l1_term(model).detach(),
        [f.counts for f in firing.values()],
        tracker.read().summary(),
    ]
    dead = tracker.dead()
    tracker.close()
    recipe.record_aux(model, False)
    small, _ = twell.compact(model, firing)
    results += [dead, small(x).detach(), twell.restore(small)(x).detach(), str(twell.explain(model))]
    recipe.reinitialize_dead(model, {name: torch.ones_like(mask) for name, mask in dead.items()}, step=1)
    # on weights of a device that is named
    sparse = twell.sparsify_(copy.deepcopy(DENSE), names=("gate_proj", "up_proj", "down_proj"))
    return [*results, *model.parameters(), sparse, DENSE(x.float()).detach()]


MODEL = nn.Sequential(SparseGatedMLP(K, N, bias=True, dtype=BF16), SparseMLP(K, N, bias=True, dtype=BF16))
DENSE = nn.Sequential(Gated(k=K, n=N))


def workloads() -> list[Any]:
    gates = torch.tensor([[1, -1] * 36, [2, 0] * 36], device="cpu")
    made = [
        testing.make("topic29", 8, device="cpu"),
        testing.pattern_problem(gates, K),
        testing.integer_problem(4, K, 72),
    ]
    return [*made, testing.exact_output(made[1]), testing.real_upstream(made[0])]


STRATEGIES = [pytest.param(lambda s=s: functions(s), id=s) for s in ("auto", "row", "union", "dense")]


@pytest.mark.parametrize("run", [*STRATEGIES, overflow, references, models, workloads])
def test_results_are_the_same_under_any_default_device(run: Callable[[], list[Any]]) -> None:
    expected = pytree.tree_leaves(run())
    with torch.device("meta"):
        found = pytree.tree_leaves(run())
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, Tensor):
            assert ours.device.type == "cpu"
            testing.assert_same(ours, theirs)
        elif not isinstance(theirs, nn.Module):
            assert ours == theirs
