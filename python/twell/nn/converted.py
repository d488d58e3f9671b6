"""The layers that ``sparsify_`` makes of modules, whose projections keep their names."""

import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from twell.base.activation import Activation
from twell.nn.layers import GATED, SparseFFN, SparseGatedMLP, SparseMLP
from twell.nn.pairs import SharedLinear, keep_hook
from twell.nn.projections import Projection


class Applied(nn.Module):
    """An activation in the place of another one in a replaced ``nn.Sequential``, which runs it no longer."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation.hidden(self.activation.after(x), None)


class _Renamed(SparseFFN):
    """A layer whose projections are children of other names, ``_names``."""

    def __init__(self, names: tuple[str, ...], linears: Iterable[nn.Linear], **options: Any) -> None:
        linears = list(linears)
        SparseFFN.__init__(self, linears[0].in_features, linears[-1].in_features, **options)
        self._names = names
        for name, linear in zip(names, linears):
            # add_module would ask the properties of these names
            self._modules[name] = linear

    @property
    def _projections(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._names

    def _is_plain(self) -> bool:
        # nn.Module stores it beside the child that has the role
        if odd := [name for name in GATED if name in self._modules and name not in self._names]:
            raise AttributeError(
                f"{odd[0]} must be set by the child's own name in a layer whose projections are "
                f"{', '.join(self._names)}, got one set as {odd[0]}: delete it, and set the other"
            )
        return super()._is_plain()

    def _add_projections(self, *_: Any) -> None:
        """They are given."""


def _child(place: int) -> Any:
    """A property: the child whose name is at this place of ``_names``."""
    return property(lambda layer: layer._modules[layer._names[place]])


def _half(place: int) -> Any:
    """A property: a layer with the views of the weight and the bias of gate, 0, or up, 1."""
    return property(lambda layer: _view(*layer._halves()[place]))


class NamedMLP(_Renamed, SparseMLP):  # type: ignore[misc]
    """A ``SparseMLP`` whose projections are children of other names, as ``wi`` and ``wo``; else the same."""

    up_proj = _child(0)
    down_proj = _child(1)


class NamedGatedMLP(_Renamed, SparseGatedMLP):
    """A ``SparseGatedMLP`` whose projections are children of other names, as ``w1``, ``w3`` and ``w2``."""

    gate_proj = _child(0)
    up_proj = _child(1)
    down_proj = _child(2)


class GivenGatedMLP(SparseGatedMLP):
    """A ``SparseGatedMLP`` whose gate is what the class that it was makes of its projection, by children and methods.

    They make the zeros, and no value below 0, so that ReLU behind them changes nothing.
    """

    _given = _fixed = True

    def __init__(self, was: type[nn.Module], steps: tuple[str, ...], k: int, n: int, **options: Any) -> None:
        super().__init__(k, n, **options)
        self._was, self._steps = was, steps

    def _is_plain(self) -> bool:
        return False

    def _readings(self) -> list[Projection | str]:
        return ["has its gate made by the model's own code", *super()._readings()[1:]]

    def _gate(self, x: Tensor) -> Any:
        return made_by(self, self._steps, self._project("gate_proj", x))

    def __getattr__(self, name: str) -> Any:
        """A method of the class that it was, which its own code may call."""
        found = getattr(self.__dict__.get("_was"), name, None)
        return types.MethodType(found, self) if isinstance(found, types.FunctionType) else super().__getattr__(name)


def made_by(module: nn.Module, steps: tuple[str, ...], gate: Tensor) -> Any:
    """The gate that children and methods of a module make of its projection."""
    kind = vars(module).get("_was", type(module))
    for step in steps:
        child = module._modules.get(step)
        gate = child(gate) if child is not None else getattr(kind, step)(module, gate)
    return gate


class FusedGatedMLP(_Renamed, SparseGatedMLP):
    """A ``SparseGatedMLP`` whose gate and up projections are one child [2 N, K], as ``gate_up_proj`` of Phi-3.

    The kernels read its two halves in place. ``gate_proj`` and ``up_proj`` are new layers around these views.
    """

    def __init__(self, names: tuple[str, ...], linears: Iterable[nn.Linear], up_first: bool, **options: Any) -> None:
        super().__init__(names, linears, **options)
        self._up_first = up_first

    gate_proj = _half(0)
    up_proj = _half(1)
    down_proj = _child(1)

    def _halves(self) -> list[tuple[Tensor, Tensor | None]]:
        weight, bias = self._applied(self._names[0])
        biases = (None, None) if bias is None else bias.chunk(2)
        return self._ordered(zip(weight.chunk(2), biases))

    def _ordered(self, halves: Iterable[Any]) -> list[Any]:
        return list(halves)[:: -1 if self._up_first else 1]

    def _operands(self) -> Iterable[tuple[Tensor, Tensor | None]]:
        return *self._halves(), self._applied(self._names[1])

    def _readings(self) -> list[Projection | str]:
        fused, down = super()._readings()
        if isinstance(fused, str):
            return [fused, fused, down]
        return [*self._ordered(fused._replace(part=part) for part in (0, 1)), down]

    def _pre_activations(self, x: Tensor) -> tuple[Any, Any]:
        gate, up = self._ordered(self._project(self._names[0], x).chunk(2, dim=-1))
        return gate, up

    def _gate(self, x: Tensor) -> Any:
        return self._pre_activations(x)[0]

    def _main_grads(self, **weights: Tensor) -> list[Tensor | None]:
        fused, down = super()._main_grads(**{name: self._applied(name)[0] for name in self._names})
        return [*((None, None) if fused is None else self._ordered(fused.chunk(2))), down]

    def _owners(self, *weights: Tensor) -> tuple[Tensor, ...]:
        fused, _ = self._applied(self._names[0])
        return fused, fused, weights[-1]


def turn(module: nn.Module, made: nn.Module) -> None:
    """Make ``module`` itself the layer ``made``, so that whatever refers to it has that layer.

    What the module's code computed with is gone: other code that calls its parts, and a method of its old class that
    something kept, raises or computes the same of the projections. Settings that are no functions stay readable.
    """
    functions = [key for key, value in vars(module).items() if callable(value) and key not in vars(made)]
    made.train(module.training)
    vars(made)["_compiled_call_impl"] = module._compiled_call_impl
    before = dict(vars(module))
    object.__setattr__(module, "__class__", type(made))
    vars(module).clear()
    vars(module).update(vars(made))
    vars(module).update({key: before[key] for key in before if key not in functions and not hasattr(module, key)})
    wrapped = types.SimpleNamespace(**{key: before[key] for key in ("forward", "_hf_hook") if key in before})
    keep_hook(module, wrapped)  # type: ignore[arg-type]


def _view(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An ``nn.Linear`` around tensors that are no parameters."""
    made: Any = SharedLinear()
    made.weight, made.bias = weight, bias
    made.out_features, made.in_features = weight.shape
    return made  # type: ignore[no-any-return]


def below(module: nn.Module, name: str) -> nn.Module | None:
    """A child, or "child.name" the child of a child; None if there is none."""
    child, _, key = name.partition(".")
    found = module._modules.get(child)
    return found._modules.get(key) if key and found is not None else found
