"""The modules: parameters, sharing, and the down weight's layout through everything that torch does to a module."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from twell import AutoStrategy
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.nn.models import set_strategy
from twell.nn.pairs import pair_up

BF16 = torch.bfloat16
MODULES = pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
K, N = 32, 264
Module = type[SparseGatedMLP] | type[SparseMLP]


def is_laid_out(mlp: nn.Module, layout: str = "linear") -> bool:
    """Whether the down weight is a Parameter [K, N], contiguous or on a storage with one contiguous row per neuron."""
    weight = mlp.down_proj.weight
    stride = (1, K) if layout == "rows" else (N, 1)
    return isinstance(weight, nn.Parameter) and weight.shape == (K, N) and weight.stride() == stride


def tokens(dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(5, K).to(dtype)


def linears(cls: Module, bias: bool = False) -> list[nn.Linear]:
    inputs = [nn.Linear(K, N, bias, dtype=BF16) for _ in range(2 if cls is SparseGatedMLP else 1)]
    return [*inputs, nn.Linear(N, K, bias, dtype=BF16)]


@MODULES
@pytest.mark.parametrize("bias", [False, True])
def test_from_linear_shares_every_parameter(cls: Module, bias: bool) -> None:
    layers, x = linears(cls, bias), tokens()
    down = layers[-1]
    before, old, place = down.weight, down.weight.detach().clone(), down.weight.data_ptr()
    mlp = cls.from_linear(*layers, compression=4, strategy="row")
    assert mlp.down_proj.weight is down.weight is before
    assert down.weight.data_ptr() == place
    assert is_laid_out(mlp)
    assert torch.equal(down.weight, old)
    for child, layer in zip(mlp.children(), layers, strict=True):
        assert child.weight is layer.weight
        assert child.bias is layer.bias
    with torch.no_grad():
        y = mlp(x)
        layers[0].weight.mul_(0)
        if bias:
            layers[0].bias.mul_(0)
        zero = mlp(x)
    assert (mlp.compression, mlp.strategy) == (4, "row")
    assert not torch.equal(y, zero)
    expected = down.bias.expand(5, K) if bias else torch.zeros(5, K, dtype=BF16)
    assert torch.equal(zero, expected)


@MODULES
@pytest.mark.parametrize("bias", [False, True])
def test_parameters_are_initialised_as_those_of_linear(cls: Module, bias: bool) -> None:
    torch.manual_seed(0)
    made = cls(K, N, bias)
    torch.manual_seed(0)
    inputs = [nn.Linear(K, N, bias) for _ in range(2 if cls is SparseGatedMLP else 1)]
    for ours, theirs in zip(made.children(), [*inputs, nn.Linear(N, K, bias)], strict=True):
        assert torch.equal(ours.weight, theirs.weight)
    again = cls(K, N, bias, device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    again.reset_parameters()
    for ours, theirs in zip(again.parameters(), made.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_reset_parameters_of_a_pair_leaves_the_other_layer_alone() -> None:
    model = nn.Sequential(OrderedDict(fc1=nn.Linear(K, N), act=nn.ReLU(), fc2=nn.Linear(N, K)))
    pair_up(model, ("fc1", "fc2"), "act", (), {})
    block = nn.Sequential(model)
    before = [p.detach().clone() for p in block[0].fc1.parameters()]
    old = block[0].fc2.weight.detach().clone()
    block[0].fc2.reset_parameters()
    assert all(map(torch.equal, block[0].fc1.parameters(), before))
    assert not torch.equal(block[0].fc2.weight, old)


def test_set_strategy_reaches_every_layer() -> None:
    model = nn.Sequential(SparseMLP(8, 8), nn.Sequential(SparseGatedMLP(8, 8)))
    set_strategy(model, "union")
    assert (model[0].strategy, model[1][0].strategy) == ("union", "union")
    site = AutoStrategy()
    set_strategy(model[1], site)
    assert (model[0].strategy, model[1][0].strategy) == ("union", site)
    # of two layers one refuses, and neither changes
    model[1][0].invariant = True
    with pytest.raises(ValueError, match='with invariant=True, got "dense"'):
        set_strategy(model, "dense")
    assert model[0].strategy == "union"
    set_strategy(model, "dense", invariant=False)
    assert (model[0].strategy, model[1][0].strategy) == ("dense", "dense")


def test_screen_is_that_of_the_strategy_that_chooses() -> None:
    """A layer that was given an ``AutoStrategy`` screened with ``screen="off"``."""
    site = AutoStrategy()
    mlp = SparseGatedMLP(K, N, strategy=site, screen="off")
    assert (site.screen, mlp.screen, mlp._site()) == ("off", "off", site)
    assert SparseMLP(K, N, strategy=site).screen == site.screen == "off"
    set_strategy(mlp, "auto")
    assert (mlp.screen, mlp._site().screens) == ("off", False)  # type: ignore[union-attr]
    set_strategy(mlp, AutoStrategy(), screen="off")
    assert (mlp.screen, mlp._site().screens) == ("off", False)  # type: ignore[union-attr]
    mlp.strategy = AutoStrategy()
    assert mlp.screen == "auto"
    mlp.screen = "off"
    assert not mlp.strategy.screens
    assert ", screen='off'" in repr(mlp)


def test_a_threshold_that_is_set_within_a_call_is_of_the_next_one() -> None:
    mlp, x = SparseMLP(16, 32, activation="fatrelu", threshold=0.1), torch.randn(8, 16)
    expected = mlp(x, return_aux=True)
    mlp.down_proj.register_forward_pre_hook(lambda *_: setattr(mlp, "threshold", 100.0))
    y, aux = mlp(x, return_aux=True)
    assert torch.equal(y, expected[0])
    assert aux.l0 == expected[1].l0 > 0
    assert mlp(x, return_aux=True)[1].l0 == 0
