"""The module classes that ``sparsify_`` knows: those of some packages, by the names of their children.

A class counts by its own name, in the package that defines it. A subclass elsewhere counts as its base if it has
nothing but an ``__init__`` of its own: with any method it may do something else.
"""

import functools
import types
from typing import Any, NamedTuple

from torch import nn

from twell.nn.converted import below
from twell.nn.pairs import PairDown

_TRANSFORMERS, _TORCH, _FLA = "transformers.models.", "torch.nn.modules.transformer", "fla.models."


class Known(NamedTuple):
    """What a class does with the children ``names``: (gate, up, down), (up, down) or (gate and up in one, down).

    attribute: of a pair within a block, the name of the activation; "" for a module that is a layer as a whole.
    dropouts: of a pair, what may drop values between the activation and the down projection: a module or its ``p``.
    steps: what makes the gate of its projection, in this order, children and methods of the class; if any, a layer
    whose attribute ``sparse`` is 0 makes no zeros. hidden: whether a block's own code squares the ReLU of
    the first for the second.
    """

    names: tuple[str, ...]
    attribute: str = ""
    dropouts: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    sparse: str = ""
    hidden: bool = False


# Modules of transformers that are a layer as a whole, by the ends of their names and by their children. Those that are
# more (a norm, a clamp, a factor, a residual) are found by trial.
_LAYER_ENDS = ("MLP", "Mlp", "MLPBlock", "FFN", "FeedForward", "FeedForwardNetwork", "ActDense", "SwiGLU")
_LAYERS = (
    *(("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"), ("gate_up_proj", "down_proj")),
    *(("up_proj", "down_proj"), ("fc1", "fc2"), ("wi", "wo"), ("dense_h_to_4h", "dense_4h_to_h"), ("c_fc", "c_proj")),
    *(("linear1", "linear2"), ("lin1", "lin2"), ("fc_in", "fc_out")),
)

# Two layers of a block with the activation between them, in this order: the layers, the activation, and what may drop
# values behind it. The block is not run: whatever else its code does with the hidden state, a pair computes the same.
_PAIRS = (
    Known(("fc1", "fc2"), "activation_fn", ("activation_dropout", "encoder_feedforward_dropout")),
    Known(("fc1", "fc2"), "activation", ("dropout",)),
    Known(("linear1", "linear2"), "activation", ("dropout",)),
    Known(("key", "value"), "act_fn"),
    Known(("intermediate.dense", "output.dense"), "intermediate.intermediate_act_fn"),
)

# Modules that make the zeros by code of their own, or drop values by another name.
_GIVEN = {
    "DabDetrEncoderLayer": Known(("fc1", "fc2"), "activation_fn", ("dropout",)),
    "Gemma3nTextMLP": Known(
        ("gate_proj", "up_proj", "down_proj"), steps=("_gaussian_topk", "act_fn"), sparse="activation_sparsity"
    ),
    "RwkvFeedForward": Known(("key", "value"), hidden=True),
}

# An nn.Sequential of Linear, activation and Linear that its owner calls as a whole.
SEQUENCE = Known(("0", "2"))

# Children of which a module of another class may be a layer; to say so is all that is done with it.
LIKELY = (*_LAYERS, ("linear_1", "linear_2"), ("w1", "w2"), ("w_1", "w_2"), ("intermediate.dense", "output.dense"))

# What the body of a class has that defines no method but __init__; _old_init: what DeepSpeed's zero.Init leaves there.
WITHOUT_METHODS = frozenset(
    {"__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__annotate_func__", "__annotate__"}
    | {"__annotations_cache__", "__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__"}
    | {"__abstractmethods__", "_abc_impl", "_old_init"}
)


def known_class(module: Any) -> tuple[str, str] | None:
    """The package root and the name of the known class that a module is of."""
    kind: Any
    for kind in type(module).__mro__:
        for root in (_TRANSFORMERS, _TORCH, _FLA):
            if kind.__module__.startswith(root):
                # a method that someone put into the class is another one
                package = root.partition(".")[0]
                methods = [kind.forward, *(f for f in vars(kind).values() if isinstance(f, types.FunctionType))]
                own = all(str(f.__module__).partition(".")[0] in (package, "torch") for f in methods)
                return (root, kind.__name__) if own else None
        if not vars(kind).keys() <= WITHOUT_METHODS:
            return None
    return None


def has_children(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether a module has children of these names, none of which is of a pair already."""
    children = [below(module, name) for name in names]
    return all(child is not None and not isinstance(child, PairDown) for child in children)


def known(module: nn.Module) -> Known | None:
    """What the tables say of a module's class."""
    root, name = known_class(module) or ("", "")
    if root == _TRANSFORMERS and name in _GIVEN:
        return _GIVEN[name]
    if root == _TRANSFORMERS and name.endswith(_LAYER_ENDS):
        return next((Known(names) for names in _LAYERS if has_children(module, names)), None)
    pairs = (each for each in _PAIRS if root and has_children(module, each.names))
    return next((each for each in pairs if _applies(module, each.attribute)), None)


def _applies(module: Any, attribute: str) -> bool:
    """Whether an attribute, perhaps of a child, is something that code calls."""
    return callable(functools.reduce(lambda part, key: getattr(part, key, None), attribute.split("."), module))


def sequence_of(module: nn.Module) -> nn.Module | None:
    """The child of this module that is a ``SEQUENCE``, if there is one."""
    return module._modules.get("ffn") if known_class(module) == (_TRANSFORMERS, "EncoderLayer") else None
