"""Models of Hugging Face transformers with their feed-forward layers through twell. ``pip install 'twell[hf]'``.

``sparsify`` converts a model, new or not; ``load`` opens saved ones::

    import twell.integrations.transformers as twell_hf
    model = twell_hf.sparsify(AutoModelForCausalLM.from_pretrained("facebook/opt-125m"))
    model = twell_hf.sparsify(LlamaForCausalLM(LlamaConfig(hidden_act="relu")))  # sparse from the start
    model = twell_hf.load("runs/relu/final")  # any saved causal model with ReLU, squared ReLU, dReLU or FATReLU
    model = twell_hf.load("SakanaAI/SparseLM0.5B", dtype=torch.bfloat16)  # and the paper's, in the stock class

``generate`` works as with any model. Prefill runs the kernels for many tokens and decode those for few tokens; the
operators choose by the number of rows. For small batches the host bounds the speed; with a static cache transformers
compiles the decoding step into CUDA graphs::

    model.generate(**inputs)  # once, eagerly: a graph keeps the choice of strategy="auto" from before it was made
    model.generate(**inputs, cache_implementation="static")  # its first call compiles

To compile by hand for the static cache, replace ``model.forward`` with
``torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)``.

``down_proj.weight`` is [hidden, intermediate] in files and in memory, as in the stock classes, so files load either
way. For inference on a GPU the layers store it by rows, in ``eval`` mode and while nothing else holds it:
``sparsify`` and ``load`` do so at once if the model is there, else the first eager call does. A ``device_map`` may
spread the model over GPUs, before or after ``sparsify``, but not offload it: weights on the CPU or on disk are refused
before it, and after it run dense or raise.
"""

import operator
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from twell import _compaction, _configuration, _down_layout, _sparsify
from twell._activation import Activation
from twell._float8_mlp import Float8MLP
from twell._runtime.log import logger
from twell.functional import Strategy
from twell.integrations import layouts
from twell.nn import SparseMLP

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        LlamaConfig,
        PreTrainedModel,
        Qwen2Config,
    )
    from transformers.activations import ACT2CLS, ACT2FN
    from transformers.modeling_utils import load_state_dict
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
except ImportError:
    raise ImportError("twell.integrations.transformers needs transformers: pip install 'twell[hf]'") from None

# after transformers, since its own message about a missing one is another
from twell.integrations import experts as stacked
from twell.integrations._trainer import SparsityCallback

__all__ = [
    "SparsityCallback",
    "load",
    "name_activation",
    "sparsify",
]

# Arguments of from_pretrained that say where files are; the configuration is read with the same ones.
_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")

# Methods of quantisation that may have weights in e4m3, and others that may have weights which a call can dequantise.
OF_E4M3 = ("fp8", "compressed-tensors")
_OF_OTHERS = ("bitsandbytes", "torchao")

# The ends of names that scales of quantised weights have in files.
_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2")

# Configurations that read those of sparse models.
_STOCK = {"LlamaConfig": LlamaConfig, "Qwen2Config": Qwen2Config}

# What a configuration may name as an activation.
_NAMED = frozenset((*ACT2FN, *_configuration.OWN))


def sparsify(
    model: Any,
    *,
    activation: Literal["relu", "relu2", "drelu"] | None = None,
    filter_fn: _sparsify.Filter | None = None,
    compression: int = 8,
    strategy: Strategy = "auto",
    names: _sparsify.Names | None = None,
    key: str | None = None,
) -> Any:
    """Run the feed-forward layers of ``model`` through twell, in place; return ``model``.

    It is a ``PreTrainedModel``, or a ``PeftModel`` around one, whose names count. Layers have ReLU, squared ReLU, dReLU
    or FATReLU; architectures are those in the table of the page on models, with and without a head.
    ``twell.sparsify_``, which it calls, documents what is taken and the arguments. ``save_pretrained`` writes the files
    of the stock class.

    A model with another activation, mostly SiLU, is refused, since its hidden state has no zeros. With
    ``activation="relu"``, "relu2" or "drelu" the model gets that one, to be trained with it, and so does its
    configuration: ``from_pretrained`` of the stock class then computes the same or, with "drelu", which no stock class
    has, raises; ``load`` reads the files of causal models. The key in the configuration is one of a table; ``key`` is
    another, as "text_config.act". ValueError for a configuration without one, and if other modules have the same one,
    as layers that ``filter_fn`` leaves out and experts stacked in one tensor do, unless ``key`` says which. It must
    name the activation of all layers that change. The key is the model's: a head that reads it when it runs, as
    classifiers of BigBird, Funnel and Nystromformer do, follows it. "fatrelu" begins as "relu":
    ``twell.recipe.TargetThreshold`` trains its threshold.

    Of a mixture of experts the dense layers, shared experts and experts that are modules are taken. So are routed
    experts stacked in one tensor, whose activation is of the family as it is: they run ``twell.sparse_experts``, by
    ``strategy`` "auto", "dense" or "row". Their down weights are laid by rows if the model is in ``eval`` mode.

    Raises TypeError or ValueError and changes nothing: as ``twell.sparsify_``, and for a model that is quantised by
    another method than "fp8", "compressed-tensors", "bitsandbytes" and "torchao".
    """
    outer, model = model, _within_peft(model)
    if not isinstance(model, PreTrainedModel):
        got = f"got {type(model).__name__}; compile it afterwards, and use twell.sparsify_ for other modules"
        raise TypeError(f"sparsify: model must be a transformers.PreTrainedModel, {got}")
    method = getattr(model, "quantization_method", None)
    if method is not None and method not in (*OF_E4M3, *_OF_OTHERS):
        raise ValueError(
            f"sparsify: weights must be in 16 bits, in e4m3 by {' or '.join(OF_E4M3)}, or weight-only by "
            f"{' or '.join(_OF_OTHERS)}, got a model quantised by {getattr(method, 'value', method)}: load a "
            "checkpoint in bfloat16 or in such a format"
        )
    experts = [each for name, each in stacked.found(model) if filter_fn is None or filter_fn(each, name)]
    try:
        planned = _sparsify.plan(model, filter_fn, activation, strategy, names, experts)
    except ValueError as error:
        if reason := stacked.left(model):
            raise ValueError(f"{error}; {reason}") from None
        raise
    changed = [candidate for candidate in planned.candidates if candidate.was is not None]
    keys = _find(model, changed, key) if changed else []
    _sparsify.apply(model, planned, compression, strategy)
    stacked.serve(model, experts, strategy, compression)
    quantised = (module for module in model.modules() if isinstance(module, Float8MLP))
    for layer in (*_sparsify.layers(model).values(), *quantised):
        for module in layer.modules():
            # transformers would initialise modules without this mark when more weights are loaded later
            module._is_hf_initialized = True  # type: ignore[assignment]
    if changed:
        _configuration.write_to_model(model, keys, changed[0].activation)
    _down_layout.lay(_sparsify.layers(model).values())
    return outer


def _within_peft(model: Any) -> Any:
    """The model inside a ``PeftModel``, or the model itself."""
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__]
    return model.get_base_model() if "peft.peft_model.PeftModel" in kinds else model


def load(model: str | Path, *, strategy: Strategy | None = None, compression: int | None = None, **options: Any) -> Any:
    """The causal model in a folder or on the Hub, with its feed-forward layers through twell.

    As ``sparsify(AutoModelForCausalLM.from_pretrained(model, **options))``, and it also reads configurations that name
    an activation which no stock class has: "drelu", and "fatrelu" with its threshold as ``hidden_act_param``, as
    MiniCPM-S names it. Layers of twell that the model's class makes stay as they are. A folder that ``save_pretrained``
    wrote of a compacted model has its layers compacted again. With ``trust_remote_code`` a folder's own code reads its
    own configuration, and what its modules compute decides.

    Files of the paper's code, and those of the sparse classes of twell 0.3, open in ``LlamaForCausalLM`` and
    ``Qwen2ForCausalLM``: with ReLU, whatever stock activation ``hidden_act`` names, with the neurons that
    ``sparsity_new_intermediate_size`` says, and without a gate where ``sparsity_gated_mlp`` is false. Their down
    weights may be [hidden, intermediate] or [intermediate, hidden]; the shape decides or, if they are square, the key
    ``sparsity_down_layout``, "linear" or "rows". ``save_pretrained`` then writes files of the stock class or, without
    a gate, which no stock class has, of the sparse one.

    ``strategy`` and ``compression`` are those of ``sparsify``; None is what the configuration says, by the keys
    ``sparsity_strategy``, ``sparsity_screen``, ``sparsity_invariant`` and ``sparsity_compression``, else the default.
    For its other arguments call ``sparsify`` itself. ``options`` are those of ``from_pretrained`` except for fields of
    the configuration. Raises as ``from_pretrained`` and ``sparsify``; FileNotFoundError for a folder that does not
    exist, unless the Hub may have one of its name; ValueError for a "fatrelu" without a threshold, for square down
    weights of a sparse class without their layout, and for files with scales that transformers leaves out.
    """
    if not Path(model).exists() and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(model)):
        raise FileNotFoundError(
            f"load: model must be a folder or the name of one on the Hub, got {str(model)!r}, which does not exist"
        )
    config = read_configuration(model, {key: options[key] for key in _WHERE if key in options})
    # transformers prefers registered classes
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    causal = None if own_code else MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # the decoder alone would have new embeddings
    whole = bool(config.architectures) and getattr(config, "is_encoder_decoder", False)
    halved = whole and causal is not None and causal.__name__ not in config.architectures
    if not own_code and (causal is None or halved):
        raise ValueError(
            f"load: the model must be a causal one, got {config.model_type!r} in {str(model)!r}: load it by its own "
            "class of transformers, and call sparsify"
        )
    asked = layouts.settings_of(vars(config.get_text_config()))
    own_code = own_code and bool(options.get("trust_remote_code"))
    own = None if own_code else _configuration.as_stock(config)
    full_size = None if own_code else _full_size(Path(model, options.get("subfolder") or ""))
    loaded, _ = read(model, config, full_size, **options)
    given = {"strategy": strategy, "compression": compression}
    settings = asked | {name: value for name, value in given.items() if value is not None}
    if not _sparsify.layers(loaded):
        sparsify(loaded, **{name: settings[name] for name in given if name in settings})
    for layer in _sparsify.layers(loaded).values():
        for name, value in settings.items():
            setattr(layer, name, value)
    if own is not None:
        with_own(loaded, own)
    if full_size is not None:
        _compaction.compact(loaded, full_size.kept, keep_removed=full_size.complete, inplace=True)
    _down_layout.lay(_sparsify.layers(loaded).values())
    return loaded


def read_configuration(model: str | Path, where: dict[str, Any]) -> Any:
    """The configuration of a model; that of a sparse one as its stock class has it, with the marker of its files."""
    content, _ = LlamaConfig.get_config_dict(model, **where)
    stock = layouts.stock_of_sparse(content)
    if stock is None:
        return AutoConfig.from_pretrained(model, **where)
    fields = layouts.as_stock(content) | {"name_or_path": str(model)}
    return _STOCK[stock].from_dict(fields)


def read(
    model: str | Path, config: Any, full_size: _compaction.FullSize | None = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """The causal model of ``config`` in its stock class, and what ``from_pretrained`` tells about loading it.

    Down weights may be stored either way. Raises ValueError as ``require_read``.
    """
    options |= {"config": config, "output_loading_info": True}
    if full_size is None and not hasattr(config, layouts.LAYOUT_KEY):
        loaded, about = AutoModelForCausalLM.from_pretrained(model, **options)
    else:
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        reader: Any = type(cls.__name__, (_Reader, cls), {"_full_size": full_size})
        loaded, about = reader.from_pretrained(model, **options)
        loaded.__class__ = cls
        # the marker is of files
        vars(loaded.config).pop(layouts.LAYOUT_KEY, None)
        if not getattr(config, layouts.UNGATED_KEY, True):
            # files that no stock class reads must not have its name
            loaded.config.__class__ = _READERS[type(config)]
    require_read(about)
    return loaded, about


class _Reader:
    """A class with this base reads files that the stock one cannot: compacted, by rows, or without a gate."""

    _full_size: _compaction.FullSize | None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if not getattr(config, layouts.UNGATED_KEY, True):
            # `with_own` gives layers what no stock class has
            activation: Literal["relu", "relu2"] = "relu2" if config.hidden_act == "relu2" else "relu"
            for block in self.base_model.layers:  # type: ignore[attr-defined]
                block.mlp = SparseMLP.from_linear(block.mlp.up_proj, block.mlp.down_proj, activation=activation)

    @classmethod
    def _load_pretrained_model(
        cls,
        model: Any,
        state_dict: dict[str, Tensor] | None,
        checkpoint_files: list[str] | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # both versions of transformers call this once files are found and the model is on meta
        if cls._full_size is not None:
            state_dict = cls._full_size.state
        elif hasattr(model.config, layouts.LAYOUT_KEY):
            state_dict = _as_linear(model.config, state_dict, checkpoint_files)
        return super()._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)  # type: ignore[misc]


def _as_linear(config: Any, state_dict: dict[str, Tensor] | None, files: list[str] | None) -> dict[str, Tensor] | None:
    """The state dict to load: the given one, or that of files that store rows, with these transposed; else None."""
    shapes: dict[str, tuple[int, ...]] = {}
    metadata: dict[str, dict[str, str] | None] = {}
    if state_dict is None:
        for file in files or ():
            if file.endswith(".safetensors"):
                header = layouts.read_header(Path(file))
                shapes |= {name: stored.shape for name, stored in header.tensors.items()}
                metadata |= dict.fromkeys(header.tensors, header.metadata)
            else:
                shapes |= {name: tuple(t.shape) for name, t in load_state_dict(file).items()}
    else:
        shapes = {name: tuple(t.shape) for name, t in state_dict.items()}
    found = layouts.layouts(shapes, config.to_dict(), metadata or None)
    rows = [name for name, layout in found.items() if layout == "rows"]
    if not rows:
        return state_dict
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{rows[0]}: quantised weights must be [hidden, intermediate], got [intermediate, hidden]")
    logger.info("%d down weights are stored [intermediate, hidden]", len(rows))
    if state_dict is None:
        # memory-mapped, as in transformers
        state_dict = {name: t for file in files or () for name, t in load_state_dict(file).items()}
    return {**state_dict, **{name: state_dict[name].t().contiguous() for name in rows}}


def _full_size(folder: Path) -> _compaction.FullSize | None:
    """The weights of a compacted model in a folder, with its removed neurons; None of any other."""
    try:
        files = layouts.weight_files(folder)
    except FileNotFoundError:
        return None
    if not any(name.endswith(_compaction.KEPT) for path in files for name in layouts.read_header(path).tensors):
        return None
    return _compaction.full_size({name: t for path in files for name, t in load_state_dict(str(path)).items()})


def require_read(about: dict[str, Any]) -> None:
    """Raise ValueError if ``from_pretrained`` has left out scales of weights, by what it tells ``about`` loading."""
    if lost := [name for name in about["missing_keys"] if name.endswith(_SCALES)]:
        raise ValueError(f"each weight in e4m3 must have its scales, got none for {min(lost)}")
    left = [name for name in about["unexpected_keys"] if name.endswith(_SCALES)]
    if left:
        raise ValueError(
            f"each scale of a weight must be read, got {min(left)} and {len(left) - 1} more that transformers leaves "
            "out, as those of ModelOpt, and weight_scale of quant_method fp8: take a checkpoint in bfloat16, or in "
            "e4m3 as FP8_DYNAMIC of compressed-tensors"
        )


def with_own(model: Any, own: _configuration.Own) -> Any:
    """Give a model that was loaded as a stock one the activation that ``_configuration.as_stock`` took from its file.

    A layer whose activation is that of another key, as in a vision tower, keeps the ReLU which that key names.
    """
    config = model.config
    if any(isinstance(module, Float8MLP) for module in model.modules()):
        # they have the stock activation, and cannot change it
        raise NotImplementedError(
            f"load: layers in e4m3 must have ReLU or its square, got {own.activation.name}: load files in 16 bits, and "
            "quantise the model"
        )
    # a causal class may take the text part of a configuration alone
    keys = [key if _has(config, key) else key._replace(path=()) for key in own.keys]
    keys = list(dict.fromkeys(key for key in keys if _has(config, key)))
    _give(_configuration.layers_of_keys(model, keys).values(), own.activation)
    _configuration.write_to_model(model, keys, own.activation)
    return model


def _has(config: Any, key: _configuration.Key) -> bool:
    """Whether a configuration has a key."""
    try:
        return hasattr(key.part(config), key.name)
    except AttributeError:
        return False


def with_activation(model: Any, activation: Activation) -> Any:
    """Give the twell layers of ``model`` another activation of the family; its configuration stays."""
    _give(_sparsify.layers(model).values(), activation)
    return model


def _give(layers: Iterable[Any], activation: Activation) -> None:
    """Give layers another activation of the family."""
    for layer in layers:
        layer.threshold = 0
        layer.activation = activation.name
        layer.threshold = activation.threshold


def name_activation(model: Any, key: str | None = None) -> None:
    """Write the activation of the twell layers of ``model`` to its configuration, with FATReLU's threshold.

    For layers whose activation was set by hand after ``sparsify``: call it before ``save_pretrained``.
    ``twell.recipe.TargetThreshold.settle`` does so itself. A threshold that moves is written as it is now, which waits
    for the device, until the next step moves it. ``key`` is that of ``sparsify``. ``load`` reads the files of causal
    models.

    Raises TypeError unless ``model`` is a ``PreTrainedModel`` and ``key`` a string, and ValueError if layers differ in
    it, if there are none or if the configuration has no keys for them alone.
    """
    if not isinstance(model := _within_peft(model), PreTrainedModel):
        raise TypeError(f"name_activation: model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    found = {Activation(layer.activation, float(layer.threshold)) for layer in _sparsify.layers(model).values()}
    if len(found) != 1:
        got = " and ".join(sorted(f"{each.name} {each.threshold:g}" for each in found)) or "no layers of twell"
        raise ValueError(
            "name_activation: all layers must have one activation and threshold, since the configuration has one for "
            f"all, got {got}"
        )
    try:
        keys = _configuration.of_layers(model, key, _NAMED)
        if key is None:
            read = {each.read(model.config) for each in keys}
            kinds = {type(ACT2FN["relu" if name in _configuration.OWN else name]) for name in read if name in _NAMED}
            _configuration.require_alone(model, keys, kinds, _configuration.is_in_layers(model))
        _configuration.write_to_model(model, keys, found.pop())
    except ValueError as error:
        raise ValueError(f"name_activation: {error}") from error


def _find(model: Any, changed: list[_sparsify.Candidate], key: str | None) -> list[_configuration.Key]:
    """The keys of an activation that ``sparsify`` changes, before it does. Raises ValueError as ``sparsify``."""
    new = changed[0].activation.name
    # of a pair its activation alone; that of GELU has a function in it
    mine = (f"{each.name}.{each.attribute if each.kind == 'pair' else ''}".strip(".") for each in changed)
    inside = tuple(f"{name}." for name in mine)
    old = [operator.attrgetter(each.attribute)(each.module) for each in changed if each.attribute is not None]
    kinds = {type(act) if isinstance(act, nn.Module) else act for act in old}
    # some are made with arguments
    named = {name for name, kind in ACT2CLS.items() if (kind[0] if isinstance(kind, tuple) else kind) in kinds}
    try:
        keys = _configuration.find(model, [each.name for each in changed], key, named or _NAMED)
        if key is None:
            _configuration.require_alone(model, keys, kinds, lambda name: f"{name}.".startswith(inside))
    except ValueError as error:
        raise ValueError(
            f'sparsify: activation="{new}" cannot be named in the configuration: {error}. twell.sparsify_ leaves the '
            "configuration alone, and save_pretrained then writes the old activation"
        ) from error
    return keys


def _reader_of(model_type: str, stock: Any) -> Any:
    """What lets the Auto classes open files of twell 0.3 in the stock class."""

    def from_dict(cls: Any, content: dict[str, Any], /, **kwargs: Any) -> Any:
        fields = layouts.as_stock(content)
        layout, size = fields.pop(layouts.LAYOUT_KEY), fields["intermediate_size"]
        # shapes tell the layout of others, and the files of square ones may
        by_rows = layout == "rows" or (layout is None and size == fields.get("hidden_size"))
        if by_rows or not fields.get(layouts.UNGATED_KEY, True):
            raise ValueError(f"{model_type} with rows or without a gate: {__name__}.load reads it")
        return stock.from_dict(fields, **kwargs)

    return type(f"{stock.__name__}Of03", (stock,), {"model_type": model_type, "from_dict": classmethod(from_dict)})


_READERS = {_STOCK[name]: _reader_of(own, _STOCK[name]) for name, (own, _) in layouts.SPARSE.values()}
for _reader in _READERS.values():
    AutoConfig.register(_reader.model_type, _reader, exist_ok=True)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        removed = re.fullmatch(r"Sparse(Llama|Qwen2)(Config|Model|For\w+)", name)
        if removed is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        new = f"sparsify({removed[1]}ForCausalLM({removed[1]}Config(hidden_act='relu')))"
        # an AttributeError of an import is not shown
        raise ImportError(f"{name} is gone: {__name__}.load(folder) reads its files, and {new} makes a new model")
