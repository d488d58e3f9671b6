"""Projections that are more than a weight: hooks, adapters, parametrizations, other forwards, global changes.

All of them take effect as in dense PyTorch, or the call raises.
"""

import copy
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ffns import BF16, Adapter, K, N, Pair
from layer_checks import CHILDREN, MODULES, Module, by_children, close, tokens
from torch import Tensor, nn

from tests.habits.derivatives import Doubled
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.nn.models import explain, set_down_layout
from twell.nn.pairs import pair_up

pytestmark = pytest.mark.usefixtures("seeded")


def pairs() -> tuple[Any, Any]:
    dense = Pair().to(BF16)
    sparse = copy.deepcopy(dense)
    pair_up(sparse, ("fc1", "fc2"), "act", (), {"strategy": "row"})
    return sparse, dense


# hooks and adapters of others


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def weight_norm(mlp: nn.Module, name: str) -> None:
    with quiet():
        child: Any = torch.nn.utils.weight_norm(mlp.get_submodule(name))
    with torch.no_grad():
        child.weight_g.mul_(3)


def spectral_norm(mlp: nn.Module, name: str) -> None:
    with quiet():
        child: Any = torch.nn.utils.spectral_norm(mlp.get_submodule(name)).eval()
    with torch.no_grad():
        child.weight_orig.add_(1)


def new_weight_norm(mlp: nn.Module, name: str) -> None:
    child: Any = torch.nn.utils.parametrizations.weight_norm(mlp.get_submodule(name))
    with torch.no_grad():
        child.parametrizations.weight.original0.mul_(3)


def pruned(mlp: nn.Module, name: str) -> None:
    from torch.nn.utils import prune

    set_down_layout(mlp, "linear")
    child = prune.random_unstructured(mlp.get_submodule(name), "weight", 0.5)
    with torch.no_grad():
        child.weight_orig.mul_(3)


def own_forward(mlp: nn.Module, name: str) -> None:
    child = mlp.get_submodule(name)
    forward = child.forward
    child.forward = lambda x: 3 * forward(x)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def subclass(mlp: nn.Module, name: str) -> None:
    child = mlp.get_submodule(name)
    setattr(mlp, name, Scaled(child.in_features, child.out_features, dtype=BF16))


def own_kind_of_weight(mlp: nn.Module, name: str) -> None:
    """A weight with its own product, like quantised ones."""
    child = mlp.get_submodule(name)
    child.weight = Doubled(child.weight.detach())


CHANGES: dict[str, Callable[[nn.Module, str], Any]] = {
    "own kind of weight": own_kind_of_weight,
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "new weight_norm": new_weight_norm,
    "pruned": pruned,
    "hook": lambda mlp, name: mlp.get_submodule(name).register_forward_hook(lambda module, args, y: 3 * y),
    "pre-hook": lambda mlp, name: mlp.get_submodule(name).register_forward_pre_hook(lambda _, args: (3 * args[0],)),
    "own forward": own_forward,
    "adapter": lambda mlp, name: setattr(mlp, name, Adapter(getattr(mlp, name))),
    "subclass": subclass,
    "wrapped": lambda mlp, name: setattr(mlp, name, nn.Sequential(getattr(mlp, name), nn.Hardtanh(-0.1, 0.1))),
}


PLACES = [*((SparseGatedMLP, name) for name in CHILDREN), *((SparseMLP, name) for name in CHILDREN[1:])]


@pytest.mark.parametrize(
    ("cls", "name", "change", "strategy"),
    [
        (*place, change, ("auto", "row", "dense")[(i + j) % 3])
        for i, place in enumerate(PLACES)
        for j, change in enumerate(CHANGES)
    ],
)
def test_children_that_are_more_than_a_weight(cls: Module, name: str, change: str, strategy: Any) -> None:
    """Adapters, hooks that compute the weight, replaced forwards: all of them take effect, or the call raises."""
    mlp = cls(K, N, True, dtype=BF16, strategy=strategy)
    with torch.no_grad():
        plain = mlp(tokens())
    CHANGES[change](mlp, name)
    mlp.record_aux = True
    y, aux = mlp(tokens(), return_aux=True)
    expected = by_children(mlp, tokens())
    close(y, expected)
    # the change is visible
    assert (y - plain).norm() > 0.1 * plain.norm()
    gate = mlp.get_submodule("gate_proj" if cls is SparseGatedMLP else "up_proj")(tokens())
    assert abs(aux.l0.item() - (gate > 0).sum().item() / len(gate)) <= 1
    assert mlp.aux is not None
    leaves = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
    got = torch.autograd.grad(y.float().sum(), leaves, allow_unused=True)
    wanted = torch.autograd.grad(expected.float().sum(), leaves, allow_unused=True)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            close(one, other)


def doubled(module: nn.Module, value: Tensor) -> Tensor:
    return 2 * value if isinstance(module, nn.Linear) else value


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def hooked(register: Callable[..., Any], hook: Callable[..., Any]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


AROUND_ALL: dict[str, Callable[[], Any]] = {
    "forward hook": lambda: hooked(
        torch.nn.modules.module.register_module_forward_hook, lambda m, args, y: doubled(m, y)
    ),
    "backward pre-hook": lambda: hooked(
        torch.nn.modules.module.register_module_full_backward_pre_hook, lambda m, dy: (doubled(m, dy[0]),)
    ),
    "nn.Linear.forward": lambda: replaced(nn.Linear, "forward", lambda f: lambda m, x: 2 * f(m, x)),
    "nn.Linear.__call__": lambda: replaced(nn.Module, "__call__", lambda f: lambda m, *args: doubled(m, f(m, *args))),
    "F.linear": lambda: replaced(F, "linear", lambda f: lambda *args: 2 * f(*args)),
}


@pytest.mark.parametrize("around", AROUND_ALL)
@pytest.mark.parametrize(("cls", "strategy"), [(SparseGatedMLP, "row"), (SparseMLP, "dense")])
def test_global_hooks_take_effect(cls: Module, strategy: Any, around: str) -> None:
    mlp = cls(K, N, True, dtype=BF16, strategy=strategy)

    def results(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        x = tokens().requires_grad_()
        y = call(x)
        return y, *torch.autograd.grad(y.float().sum(), [x, *mlp.parameters()])

    before = results(mlp)
    with AROUND_ALL[around]():
        got, expected = results(mlp), results(lambda x: by_children(mlp, x))
    assert not all(torch.equal(one, other) for one, other in zip(got, before, strict=True))
    for one, other in zip(got, expected, strict=True):
        close(one, other)
    assert all(torch.equal(one, other) for one, other in zip(results(mlp), before, strict=True))


SET_LATER: dict[str, Callable[[Any], Any]] = {
    "function": lambda child: lambda x: 3 * nn.Linear.forward(child, x),
    "method": lambda child: types.MethodType(lambda self, x: 3 * nn.Linear.forward(self, x), child),
    "another's": lambda child: nn.Linear(child.in_features, child.out_features, dtype=BF16).forward,
}


@pytest.mark.parametrize("later", SET_LATER)
@pytest.mark.parametrize(
    ("cls", "strategy", "name"), [(SparseGatedMLP, "row", "up_proj"), (SparseMLP, "dense", "down_proj")]
)
def test_compiled_layers_see_a_forward_that_is_set_later(cls: Module, strategy: Any, name: str, later: str) -> None:
    torch.compiler.reset()
    mlp, graphs = cls(K, N, True, dtype=BF16, strategy=strategy), []
    compiled = torch.compile(mlp, backend=lambda graph, _: graphs.append(graph.code) or graph.forward, fullgraph=True)
    child = mlp.get_submodule(name)
    with torch.no_grad():
        before = compiled(tokens())
        assert ("twell" in graphs[0]) == (strategy == "row")
        child.forward = SET_LATER[later](child)
        got = compiled(tokens())
        close(got, by_children(mlp, tokens()))
        assert (got - before).norm() > 0.1 * before.norm()
        del child.forward
        assert torch.equal(compiled(tokens()), before)
        assert len(graphs) == 2


def test_code_put_around_linear_layers_before_twell_is_imported_counts(environment: dict[str, str]) -> None:
    code = """
import torch
from torch import nn
original = nn.Linear.forward
nn.Linear.forward = lambda self, x: 2 * original(self, x)
from twell.nn import SparseMLP
print(SparseMLP(8, 8)._is_plain())
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@MODULES
def test_compiled_graphs_see_global_hooks(cls: Module) -> None:
    torch.compiler.reset()
    mlp, graphs = cls(K, N, dtype=BF16), []
    compiled = torch.compile(mlp, backend=lambda graph, _: graphs.append(1) or graph.forward, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            close(compiled(tokens()), mlp(tokens()))
        assert len(graphs) == 1
        with AROUND_ALL["nn.Linear.forward"]():
            close(compiled(tokens()), by_children(mlp, tokens()))
        assert torch.equal(compiled(tokens()), mlp(tokens()))


def test_changed_children_are_seen_and_forgotten() -> None:
    mlp = SparseGatedMLP(K, N, dtype=BF16, strategy="row")
    with torch.no_grad():
        sparse = mlp(tokens())
        handle = mlp.down_proj.register_forward_hook(lambda module, args, y: 3 * y)
        assert not torch.equal(mlp(tokens()), sparse)
        (choice,) = explain(mlp).rows
        assert (choice.strategy, choice.reason) == (
            "dense",
            "down_proj has hooks or a replaced forward (peft sets some)",
        )
        handle.remove()
        assert torch.equal(mlp(tokens()), sparse)


@pytest.mark.parametrize(
    ("change", "index"),
    zip(["hook", "pre-hook", "own forward", "weight_norm", "subclass", "adapter"], [0, 1, 2, 0, 1, 2]),
)
def test_changed_linears_make_no_layer(index: int, change: str) -> None:
    """Otherwise only the weight would be shared."""
    layers = SparseGatedMLP(K, N, dtype=BF16, strategy="row")
    CHANGES[change](layers, CHILDREN[index])
    with pytest.raises(TypeError, match=rf"{CHILDREN[index].removesuffix('_proj')} must be a plain nn.Linear, without"):
        SparseGatedMLP.from_linear(*(layers.get_submodule(name) for name in CHILDREN))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("fc1", "weight_norm"), ("fc2", "spectral_norm"), ("fc1", "new weight_norm")),
        *(("fc1", "pre-hook"), ("fc2", "hook"), ("fc2", "wrapped")),
    ],
)
def test_children_of_a_pair_that_are_changed_later(name: str, change: str) -> None:
    both = pairs()
    for pair in both:
        torch.manual_seed(0)
        CHANGES[change](pair, name)
    with torch.no_grad():
        close(*(pair(tokens()) for pair in both))


@MODULES
def test_a_weight_of_the_other_layout_is_refused(cls: Module) -> None:
    """[intermediate, hidden] is a file's layout, which must not be mistaken for the transposed view."""
    mlp = cls(K, N, dtype=BF16)
    state = mlp.state_dict()
    rows = state | {"down_proj.weight": state["down_proj.weight"].t()}
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"size mismatch for down_proj\.weight"):
            mlp.load_state_dict(rows, assign=assign)
    mlp.down_proj.weight = nn.Parameter(rows["down_proj.weight"])
    with pytest.raises(ValueError, match=r"w_down must be \[32, 264\] .*, got \[264, 32\]"):
        mlp(tokens())
