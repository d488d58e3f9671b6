"""``save_pretrained`` of transformers for models with layers in e4m3: their configuration says what files hold.

The model that is saved tells, wherever its layers come from: from ``quantize_`` of it or of a part, or by hand.
"""

import contextlib
import copy
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from twell.float8 import E4M3
from twell.integrations import float8_layouts

_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}


def watch() -> None:
    """Let ``save_pretrained`` of transformers, where it is imported, see to the layers of twell in e4m3."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None or hasattr(base.save_pretrained, "_of_twell"):
        return
    stock = base.save_pretrained

    @functools.wraps(stock)
    def save_pretrained(self: Any, *args: Any, **options: Any) -> Any:
        with _described(self):
            return stock(self, *args, **options)

    save_pretrained._of_twell = True  # type: ignore[attr-defined]
    base.save_pretrained = save_pretrained


@contextlib.contextmanager
def _described(model: Any) -> Iterator[None]:
    """Let the configuration of a model name its layers in e4m3, as FP8_DYNAMIC of compressed-tensors.

    Raises NotImplementedError if it cannot.
    """
    config = model.config
    stated = getattr(config, "quantization_config", None)
    weights = {name: weight for name, weight in _weights(model).items() if weight.dtype == E4M3}
    if stated is not None and (weights or _differ(model, stated)):
        raise NotImplementedError(
            "save_pretrained: weights must be stored as the configuration says, got layers of twell with others in "
            "place of quantised ones: the files that the model was loaded from hold the same values"
        )
    if not weights:
        yield
        return
    targets = [rf"(.*\.)?{re.escape(name)}$" for name in weights]
    others = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in weights)
    if alike := [name for name in others if any(re.match(target, name) for target in targets)]:
        raise NotImplementedError(
            "save_pretrained: names of layers in e4m3 must not end those of others, of which readers would take the "
            f"weights for e4m3, got {alike[0]}: quantise both, or rename one"
        )
    group = {
        "targets": [f"re:{target}" for target in targets],
        "weights": {**_E4M3, "strategy": "channel", "dynamic": False},
        "input_activations": {**_E4M3, "strategy": "token", "dynamic": True},
    }
    # other models may share it
    model.config = copy.deepcopy(config)
    model.config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
    }
    try:
        yield
    finally:
        model.config = config


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of layers of twell, by the names of their projections."""
    return {
        inner: weight
        for name, layer in model.named_modules()
        if type(layer).__module__.startswith("twell.")
        for inner, projection in layer.named_modules(prefix=name)
        if (weight := projection._parameters.get("weight")) is not None
    }


def _differ(model: nn.Module, stated: Any) -> bool:
    """Whether a configuration tells of weights in e4m3 where layers of twell have others."""
    settings = stated if isinstance(stated, Mapping) else stated.to_dict()
    try:
        return any(float8_layouts.how(settings, name) is not None for name in _weights(model))
    except NotImplementedError:
        # weights of other formats, which layers keep as they are
        return False
