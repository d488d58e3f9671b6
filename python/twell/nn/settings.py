"""What layers have in common: settings, which are checked when they are set, and the ``AutoStrategy`` that chooses."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from twell.base.activation import Activation, ActivationName, activation_of
from twell.base.arguments import require_flag
from twell.call.functional import Strategy
from twell.choose.plan import Facts, routed
from twell.choose.site import AutoStrategy, Screen
from twell.nn.record import watch
from twell.ops.calls import How
from twell.runtime import geometry, modes


def name_of(strategy: Any) -> Any:
    """The name of a strategy or a site."""
    return "auto" if isinstance(strategy, AutoStrategy) else strategy


def setting(name: str) -> Any:
    """A property that checks each value it is given; the value is stored under ``_name``."""
    # under the property's own name, torch.compile of torch 2.11 would ask the property again, for ever
    kept = f"_{name}"

    def get(self: nn.Module) -> Any:
        # always there: torch.compile has no guard on absent attributes
        return self.__dict__[kept]

    def put(self: Configured, value: Any) -> None:
        self._require(name, value)
        self._set(**{kept: value})

    return property(get, put)


class Configured(nn.Module):
    """Base of layers: their settings, and what calls ask by them."""

    _gated = False
    # attributes that copies and pickles leave out
    _unsaved = ("aux", "_laid", "_how")
    # names of properties
    _settings: frozenset[str] = frozenset(
        ("strategy", "invariant", "compression", "activation", "threshold", "screen", "fast_accum")
    )
    _auto: AutoStrategy
    _how: How
    _strategy: Strategy | AutoStrategy
    _invariant: bool
    _compression: int
    _activation: ActivationName
    _threshold: float | Tensor
    strategy: Strategy | AutoStrategy = setting("strategy")
    invariant: bool = setting("invariant")
    compression: int = setting("compression")
    activation: ActivationName = setting("activation")
    threshold: float | Tensor = setting("threshold")

    def _require(self, name: str, value: Any) -> None:
        """Raise TypeError or ValueError unless a setting may have this value."""
        if name == "activation":
            activation_of(value, self.__dict__.get("_threshold", 0), self._gated)
        elif name == "threshold":
            activation_of(self._activation, value, self._gated)
        elif name == "strategy":
            routed(Facts(strategy=name_of(value), invariant=self.__dict__.get("_invariant", False)))
        elif name == "invariant":
            routed(Facts(strategy=name_of(self._strategy), invariant=value))
        elif name == "compression":
            geometry.words_per_tile(value)
        else:
            require_flag(name, value)

    def _set(self, **settings: Any) -> None:
        """Take settings that were checked; what calls ask is of one moment."""
        self.__dict__.update(settings)
        if "_how" in self.__dict__:
            self.__dict__["_how"] = self._asked()

    def _asked(self) -> How:
        activation = activation_of(self._activation, self._threshold, self._gated)
        return How(activation, self._site() or self._strategy, self._invariant, self._compression)

    def _form(self) -> Activation:
        """The activation that calls have, its name and threshold of one moment; a tensor's value is looked at."""
        return self._asked().activation if modes.compiling() else activation_of(*self._how.activation, self._gated)

    def _site(self) -> AutoStrategy | None:
        """The ``AutoStrategy`` that chooses; None if nothing is left to choose."""
        if self._invariant:
            return None
        if isinstance(self._strategy, AutoStrategy):
            return self._strategy
        return self._auto if self._strategy == "auto" else None

    @property
    def screen(self) -> Screen:
        """``AutoStrategy.screen`` of the layer's ``strategy`` if that is one, else of its own, which "auto" has.

        Setting it sets both, and so that of other layers which share the ``AutoStrategy``.
        """
        return self._strategy.screen if isinstance(self._strategy, AutoStrategy) else self._auto.screen

    @screen.setter
    def screen(self, value: Screen) -> None:
        self._auto.screen = value
        if isinstance(self._strategy, AutoStrategy):
            self._strategy.screen = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._settings:
            # nn.Module would make a child of a module, and a parameter of a Parameter, before the property sees it
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._unsaved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._how = self._asked()
        watch()
