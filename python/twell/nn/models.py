"""What sets or explains the layers of a whole model."""

from __future__ import annotations

from typing import Any

from torch import nn

from twell.base.arguments import require
from twell.call.functional import Strategy
from twell.choose.explanation import Choice, Explanation
from twell.choose.plan import Facts, routed
from twell.choose.site import AutoStrategy, Screen, require_screen
from twell.nn import down_layout, explained
from twell.nn.autoencoder import SparseAutoencoder
from twell.nn.float8 import Float8MLP
from twell.nn.layers import DownLayout, SparseFFN, require_layout
from twell.nn.settings import Configured, name_of

_OTHERS = Float8MLP, SparseAutoencoder


def explain(layers: nn.Module | AutoStrategy) -> Explanation:
    """Return the strategy of each layer of ``layers``, the reason and the measured figures; ``print`` it for a table.

    ``layers`` is a module that is or contains layers of ``twell.nn``, or the ``AutoStrategy`` of a call site. The call
    neither waits nor changes anything: figures still on their way from the GPU are left out. Only "auto" measures, and
    only where it may choose; on a CPU the non-zeros are those of ``aux``, where the last call recorded it.
    """
    if isinstance(layers, AutoStrategy):
        none = Choice("", "any", "any", "", "auto", "no call has chosen yet: on a CPU all are dense")
        return Explanation(tuple(layers.explain()) or (none,))
    if not isinstance(layers, nn.Module):
        raise TypeError(f"layers must be an nn.Module or an AutoStrategy, got {type(layers).__name__}")
    rows: list[Choice] = []
    for name, layer in (named_layers(layers, _OTHERS) | named_layers(layers)).items():
        # of a pair the module around both, where that is among the layers
        block_of: Any = getattr(layer, "block_of", None)
        block = layer if block_of is None else layers.get_submodule(block_of(name))
        own = explained.rows(name, layer, block) if isinstance(layer, SparseFFN) else layer.explain(name)
        rows += explained.bypassed(name, layer, block) or own
    return Explanation(tuple(rows))


def set_strategy(
    module: nn.Module,
    strategy: Strategy | AutoStrategy,
    *,
    screen: Screen | None = None,
    invariant: bool | None = None,
) -> None:
    """Set ``strategy`` of every layer of ``twell.nn`` in ``module``; with "auto" each chooses for itself.

    ``screen`` and ``invariant`` are set, too, unless they are None. An ``AutoStrategy`` is for one layer: layers that
    share it share their figures and its ``screen``.

    Raises as the attributes do, and ValueError if ``module`` has no such layer; then nothing has changed.
    """
    layers = [*named_layers(module).values(), *named_layers(module, _OTHERS).values()]
    _require_any(module, layers)
    if screen is not None:
        require_screen(screen)
    for layer in layers:
        routed(Facts(strategy=name_of(strategy), invariant=layer.invariant if invariant is None else invariant))
    for layer in layers:
        if isinstance(layer, SparseAutoencoder):
            # raises if True
            layer.invariant = bool(invariant)
            layer.strategy = strategy
    for layer in layers:
        if isinstance(layer, Configured):
            # both at once: the one may not go with the other's old value
            layer._set(_strategy=strategy, **({} if invariant is None else {"_invariant": invariant}))
        if screen is not None and not isinstance(layer, Float8MLP):
            layer.screen = screen


def set_down_layout(module: nn.Module, layout: DownLayout) -> None:
    """Set the layout of ``down_proj.weight`` in every layer of ``twell.nn`` in ``module``. Shapes stay [K, N].

    "auto", the default: as nn.Linear stores it, for all code that sees the Parameter. In ``eval`` mode and without
    gradients a call on a GPU first stores it by rows, which the kernels read in place, if nothing else holds the
    Parameter or its memory. The layer puts it back where it is listed, by ``parameters()`` or ``modules()``, and by
    ``state_dict``, ``train``, ``to``, copies, pickles, and calls that need its gradient. Both wait for the GPU, once.
    A weight that a CUDA graph reads stays as it is. Only code that reads ``down_proj.weight`` itself sees the rows.

    "linear": contiguous, always. The sparse kernels then read a copy by rows, made at each forward and each backward
    pass: 23 MB at K = 2,048 and N = 5,632. "rows": the transposed view of a contiguous [N, K] tensor, always; also for
    training where nothing flattens parameters. FSDP2, flat optimizers such as LBFGS, ``parameters_to_vector`` and
    safetensors refuse such a weight or need ``.contiguous()``; ``set_down_layout(module, "auto")`` is the way back.

    Loading a state dict keeps each; moving, casting, copying and pickling keep "linear" and "rows". Call it before
    anything keeps views of the parameters; the Parameter objects stay, and their gradients change layout with them. The
    state of an optimizer does not, and fused optimizers read it in memory order: set the layout before the optimizer's
    first step, and use the layout of the run whose state is loaded. A weight that was replaced by one of another layout
    is set right, too.

    Raises ValueError for another name, and if ``module`` has no such layer.
    """
    require_layout("layout", layout)
    layers = named_layers(module)
    _require_any(module, layers)
    for layer in layers.values():
        layer.down_layout = layout
        with layer._laid.lock:
            layer._laid.weight = None
            down_layout.store(layer.down_proj.weight, layout == "rows")


def named_layers(module: nn.Module, kinds: Any = SparseFFN) -> dict[str, Any]:
    """The layers of ``module`` by qualified name, each by its first; listing them hands out no parameters.

    They are gated and non-gated ones, and ``fc2`` of pairs; or those of other ``kinds``.
    """
    require("module", module, nn.Module, "an nn.Module")
    with down_layout.unlisted():
        return {name: layer for name, layer in module.named_modules() if isinstance(layer, kinds)}


def _require_any(module: nn.Module, layers: object) -> None:
    if not layers:
        raise ValueError(f"module must have layers of twell.nn, got none in {type(module).__name__}")
