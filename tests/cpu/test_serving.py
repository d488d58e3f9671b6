"""Modules in servers and other libraries: late weights, inference mode, copies, threads, whole models.

After each of these a layer must compute the result of its children (nn.Linear, ReLU, product), or raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ffns import BF16, K, N
from layer_checks import MODULES, Module, agrees, tokens
from torch import Tensor, nn

from twell.nn import SparseGatedMLP, SparseMLP, set_down_layout


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def new_state(mlp: nn.Module) -> dict[str, Tensor]:
    """Other weights, contiguous as in a file."""
    generator = torch.Generator().manual_seed(7)
    made: dict[int, Tensor] = {}
    state = {}
    for name, t in mlp.state_dict().items():
        # tied ones stay equal
        if t.data_ptr() not in made or t.is_meta:
            made[t.data_ptr()] = (torch.randn(t.shape, generator=generator) / t.shape[-1] ** 0.5).to(t.dtype)
        state[name] = made[t.data_ptr()]
    return state


def owner(mlp: nn.Module, name: str) -> tuple[nn.Module, str]:
    prefix, _, leaf = name.rpartition(".")
    return mlp.get_submodule(prefix), leaf


# weights that come after construction


def copied(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in mlp.named_parameters():
            parameter.copy_(state[name])


def in_slices(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    # as in loaders of tensor-parallel shards
    for name, parameter in mlp.named_parameters():
        half = parameter.shape[0] // 2
        parameter.data[:half].copy_(state[name][:half])
        parameter.data.narrow(0, half, parameter.shape[0] - half).copy_(state[name][half:])


def as_data(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    for name, parameter in mlp.named_parameters():
        parameter.data = state[name]


def as_parameters(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    for name in list(dict(mlp.named_parameters())):
        module, leaf = owner(mlp, name)
        setattr(module, leaf, nn.Parameter(state[name], requires_grad=False))


def as_replaced_parameters(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    # past nn.Module.__setattr__, as in accelerate
    for name in list(dict(mlp.named_parameters())):
        module, leaf = owner(mlp, name)
        module._parameters[leaf] = nn.Parameter(state[name])


def through_state_dict(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    for name, tensor in mlp.state_dict().items():
        tensor.copy_(state[name])


def assigned_by_child(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    for name, child in mlp.named_children():
        prefix = f"{name}."
        part = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
        child.load_state_dict(part, assign=True)


def assigned_in_odd_layouts(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    wide = {name: torch.stack((t, -t), -1)[..., 0] if t.dim() == 2 else t for name, t in state.items()}
    mlp.load_state_dict(wide, assign=True)


def swapped(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        mlp.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


LOADERS = [
    *(copied, in_slices, as_data, as_parameters, as_replaced_parameters, through_state_dict),
    *(assigned_by_child, assigned_in_odd_layouts, swapped),
]


@pytest.mark.parametrize(
    ("cls", "load", "layout"),
    [
        (cls, load, layout)
        for i, load in enumerate(LOADERS)
        for cls, layout in zip((SparseGatedMLP, SparseMLP), (("rows", "linear"), ("linear", "rows"))[i % 2])
    ],
)
def test_weights_that_come_after_a_call(cls: Module, load: Callable[..., None], layout: Any) -> None:
    mlp = cls(K, N, bias=True, dtype=BF16)
    set_down_layout(mlp, layout)
    state = new_state(mlp)
    expected = cls(K, N, bias=True, dtype=BF16)
    expected.load_state_dict(state)
    agrees(mlp)
    load(mlp, {name: tensor.clone() for name, tensor in state.items()})
    for name, tensor in mlp.state_dict().items():
        assert torch.equal(tensor, state[name])
    with torch.no_grad():
        assert torch.equal(mlp(tokens()), expected(tokens()))
    mlp.requires_grad_()
    mlp(tokens()).float().sum().backward()
    expected(tokens()).float().sum().backward()
    for one, other in zip(mlp.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


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


# inference mode


# construction without memory, devices and dtypes
