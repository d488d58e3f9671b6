"""Models of Hugging Face transformers with their feed-forward layers through twell. ``pip install 'twell[hf]'``.

``sparsify`` converts an existing model. ``SparseLlamaForCausalLM`` and ``SparseQwen2ForCausalLM`` are sparse from the
start, for training from scratch and for checkpoints; importing this module registers them with the Auto classes, and
with ``AutoModel``, ``AutoModelForSequenceClassification`` (reward models, too) and ``AutoModelForTokenClassification``
what has their bodies::

    import twell.integrations.transformers as twell_hf
    model = twell_hf.sparsify(AutoModelForCausalLM.from_pretrained("facebook/opt-125m"))
    model = twell_hf.SparseLlamaForCausalLM.from_pretrained("SakanaAI/SparseLM0.5B", dtype=torch.bfloat16)
    model = twell_hf.load("runs/relu/final")  # any saved causal model with ReLU, squared ReLU, dReLU or FATReLU

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

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from twell import _compaction, _configuration, _down_layout, _sparsify
from twell._activation import Activation
from twell._float8_mlp import Float8MLP
from twell._runtime.log import logger
from twell.functional import Strategy
from twell.integrations import layouts
from twell.nn import SparseGatedMLP, SparseMLP

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        LlamaForTokenClassification,
        LlamaModel,
        PreTrainedModel,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
        Qwen2ForTokenClassification,
        Qwen2Model,
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
    "SparseLlamaConfig",
    "SparseLlamaForCausalLM",
    "SparseLlamaForSequenceClassification",
    "SparseLlamaForTokenClassification",
    "SparseLlamaModel",
    "SparseQwen2Config",
    "SparseQwen2ForCausalLM",
    "SparseQwen2ForSequenceClassification",
    "SparseQwen2ForTokenClassification",
    "SparseQwen2Model",
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

    ``strategy`` and ``compression`` are those of ``sparsify``; None is what the configuration says, by the keys of
    ``SparseLlamaConfig``, else the default, or what the model's class chooses.
    For its other arguments call ``sparsify`` itself. ``options`` are those of ``from_pretrained`` except for fields of
    the configuration. Raises as ``from_pretrained`` and ``sparsify``; FileNotFoundError for a folder that does not
    exist, unless the Hub may have one of its name; ValueError for a "fatrelu" without a threshold, for down weights
    that ``twell convert`` stored by rows for a stock class, and for files with scales that transformers leaves out.
    """
    if not Path(model).exists() and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(model)):
        raise FileNotFoundError(
            f"load: model must be a folder or the name of one on the Hub, got {str(model)!r}, which does not exist"
        )
    where = {key: options[key] for key in _WHERE if key in options}
    config = AutoConfig.from_pretrained(model, **where)
    if not isinstance(config, _SparseConfig) and getattr(config, layouts.LAYOUT_KEY, None) == "rows":
        raise ValueError(
            f"load: down weights must be as nn.Linear has them, got rows in {str(model)!r}: use "
            "SparseLlamaForCausalLM.from_pretrained or SparseQwen2ForCausalLM.from_pretrained, or convert it by `twell "
            "convert`"
        )
    # transformers prefers registered classes, as twell's
    own_code = not isinstance(config, _SparseConfig) and "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
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
    options |= {"config": config, "output_loading_info": True}
    if full_size is None:
        loaded, about = AutoModelForCausalLM.from_pretrained(model, **options)
    else:
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        reader: Any = type(cls.__name__, (_FullSize, cls), {"_state": full_size.state})
        loaded, about = reader.from_pretrained(model, **options)
        loaded.__class__ = cls
    require_read(about)
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


class _FullSize:
    """A class with this base reads ``_state`` in place of the files that it finds."""

    _state: dict[str, Tensor]

    @classmethod
    def _load_pretrained_model(cls, model: Any, state_dict: None, *args: Any, **kwargs: Any) -> Any:
        return super()._load_pretrained_model(model, cls._state, *args, **kwargs)  # type: ignore[misc]


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
    """Give a model that was loaded as a stock one the activation that ``layouts.as_stock`` took from its file.

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


class _SparseConfig:
    """Base of both configurations: reads those of stock models and of the paper's models."""

    model_type: str
    # model types of checkpoints with the same tensors: the stock model's and the paper's training code's
    _read_as_own: tuple[str, ...] = ()

    def __init__(
        self,
        hidden_act: str = "relu",
        sparsity_strategy: str = "auto",
        sparsity_screen: str = "auto",
        sparsity_invariant: bool = False,
        sparsity_compression: int = 8,
        sparsity_down_layout: str | None = None,
        **kwargs: Any,
    ) -> None:
        fields = _fields({"hidden_act": hidden_act, **kwargs})
        own = (sparsity_strategy, sparsity_screen, sparsity_invariant, sparsity_compression, sparsity_down_layout)
        super().__init__(**fields, **dict(zip(layouts.OWN_KEYS, own)))

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """As the base class, without a warning for model types in ``_read_as_own``."""
        content, unused = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        if content.get("model_type") in cls._read_as_own:
            content["model_type"] = cls.model_type
        return content, unused


def _fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration; those of the paper's models as the paper's code reads them."""
    # the class has its own model_type, which the content's must not hide
    fields.pop("model_type", None)
    theirs = [key for key in fields if key.startswith("sparsity_") and key not in layouts.OWN_KEYS]
    if theirs and fields["hidden_act"] not in ("relu", *_configuration.OF_SPARSE):
        logger.info(
            "the layers apply ReLU because %s is set; hidden_act is ignored: %r", theirs[0], fields["hidden_act"]
        )
        fields["hidden_act"] = "relu"
    if fields.get("sparsity_new_intermediate_size") is not None:
        fields["intermediate_size"] = fields["sparsity_new_intermediate_size"]
    return fields


class SparseLlamaConfig(_SparseConfig, LlamaConfig):  # type: ignore[misc]
    """``LlamaConfig`` of a model whose feed-forward layers are twell's, ``model_type`` "sparse_llama".

    Args:
        hidden_act: "relu"; the model refuses any other.
        sparsity_strategy, sparsity_screen, sparsity_invariant: of every layer, as in ``twell.nn.SparseGatedMLP``.
        sparsity_compression: 2, 4 or 8, likewise.
        sparsity_down_layout: of a checkpoint's files: "linear" if down weights are stored [hidden, intermediate],
            "rows" if [intermediate, hidden]. Needed if both are equal, else the shape decides. ``save_pretrained`` of
            the model always writes "linear". ``from_pretrained`` takes it, too.
        sparsity_gated_mlp: False for layers without a gate, ``twell.nn.SparseMLP``. A key of the paper's
            configurations, as is ``sparsity_new_intermediate_size``; with either, ``hidden_act`` counts as "relu".

    All other arguments are those of ``LlamaConfig``.
    """

    model_type = "sparse_llama"
    _read_as_own = ("llama", "llama_sparse_relu")
    # the projections of a layer are not called one by one; twell.distributed has plans for it
    base_model_tp_plan = {k: v for k, v in (LlamaConfig.base_model_tp_plan or {}).items() if ".mlp." not in k}  # noqa: RUF012
    # transformers 5 writes one for a class without its own
    __init__ = _SparseConfig.__init__


class SparseQwen2Config(_SparseConfig, Qwen2Config):  # type: ignore[misc]
    """``Qwen2Config`` likewise, ``model_type`` "sparse_qwen2"; the further arguments are ``SparseLlamaConfig``'s."""

    model_type = "sparse_qwen2"
    _read_as_own = ("qwen2", "qwen2_sparse_relu")
    base_model_tp_plan = {k: v for k, v in (Qwen2Config.base_model_tp_plan or {}).items() if ".mlp." not in k}  # noqa: RUF012
    __init__ = _SparseConfig.__init__


class _SparseModel:
    """Base of both models: their layers, and files with down weights stored either way."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        expected = type(self).config_class  # type: ignore[attr-defined]
        if not isinstance(config, expected):
            raise TypeError(
                f"{type(self).__name__}: config must be a {expected.__name__}, got {type(config).__name__}; "
                f"{expected.__name__}(**config.to_dict()) makes one"
            )
        if config.hidden_act in _configuration.OF_SPARSE:
            raise ValueError(
                f'{type(self).__name__}: hidden_act must be "relu", got {config.hidden_act!r}, which '
                "twell.integrations.transformers.load reads"
            )
        if config.hidden_act != "relu":
            raise ValueError(
                f'{type(self).__name__}: hidden_act must be "relu", got {config.hidden_act!r}: the kernels skip the '
                "neurons that ReLU sets to zero, and other activations have none. A model pretrained with another must "
                'be trained further with ReLU first (arXiv 2310.04564); to do that, pass hidden_act="relu"'
            )
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        # after their initialisation, so that a seed gives the stock model's weights; heads may take the body from here
        for block in self.base_model.layers:  # type: ignore[attr-defined]
            if not isinstance(block.mlp, (SparseGatedMLP, SparseMLP)):
                block.mlp = _layer(block.mlp, config)

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
        converted = _as_linear(model.config, state_dict, checkpoint_files)
        model.config.sparsity_down_layout = "linear"
        return super()._load_pretrained_model(model, converted, checkpoint_files, *args, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As in the stock class; down weights are stored [hidden, intermediate]."""
        self.config.sparsity_down_layout = "linear"  # type: ignore[attr-defined]
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]


def _layer(mlp: Any, config: Any) -> SparseGatedMLP | SparseMLP:
    options = layouts.settings_of(vars(config))
    if getattr(config, "sparsity_gated_mlp", True):
        return SparseGatedMLP.from_linear(mlp.gate_proj, mlp.up_proj, mlp.down_proj, **options)
    return SparseMLP.from_linear(mlp.up_proj, mlp.down_proj, **options)


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
    if getattr(config, "quantization_config", None) is not None or any(name.endswith(_SCALES) for name in shapes):
        raise ValueError(
            f"{config.model_type}: files must have weights of 16 or 32 bits, got quantised ones: "
            "twell.integrations.transformers.load reads those in e4m3 of stock classes, as `twell convert --model-type "
            f"{config.model_type.removeprefix('sparse_')}` makes them"
        )
    if any(name.endswith(_compaction.KEPT) for name in shapes):
        raise ValueError("the files are of a compacted model, which twell.integrations.transformers.load reads")
    try:
        found = layouts.layouts(shapes, config.to_dict(), metadata or None)
    except ValueError as error:
        hint = f"; from_pretrained takes {layouts.LAYOUT_KEY} as an argument"
        raise ValueError(f"{error}{hint if config.hidden_size == config.intermediate_size else ''}") from None
    rows = [name for name, layout in found.items() if layout == "rows"]
    if not rows:
        return state_dict
    logger.info("%d down weights are stored [intermediate, hidden]", len(rows))
    if state_dict is None:
        # memory-mapped, as in transformers
        state_dict = {name: t for file in files or () for name, t in load_state_dict(file).items()}
    return {**state_dict, **{name: state_dict[name].t().contiguous() for name in rows}}


class _SparseLlama(_SparseModel):
    config_class = SparseLlamaConfig


class _SparseQwen2(_SparseModel):
    config_class = SparseQwen2Config


class SparseLlamaForCausalLM(_SparseLlama, LlamaForCausalLM):  # type: ignore[misc]
    """``LlamaForCausalLM`` with a ``twell.nn.SparseGatedMLP`` as ``mlp`` of each block; see ``SparseLlamaConfig``.

    Same keys, shapes and initial values as the stock model with ``hidden_act="relu"``. Raises ValueError for another;
    ``load`` reads files with "relu2", "drelu" and "fatrelu".

    ``from_pretrained`` takes files of this class, of the stock class and of the paper's code. Down weights may be
    stored [hidden, intermediate] or [intermediate, hidden], in safetensors or pickled, whole or in shards; the shape
    and the configuration decide. It raises ValueError for square ones without ``sparsity_down_layout`` in the
    configuration or among the arguments.
    """


class SparseLlamaModel(_SparseLlama, LlamaModel):  # type: ignore[misc]
    """``LlamaModel`` likewise: the body of ``SparseLlamaForCausalLM``, whose files it reads."""


class SparseLlamaForSequenceClassification(_SparseLlama, LlamaForSequenceClassification):  # type: ignore[misc]
    """``LlamaForSequenceClassification`` likewise: a classifier or, with ``num_labels=1``, a reward model."""


class SparseLlamaForTokenClassification(_SparseLlama, LlamaForTokenClassification):  # type: ignore[misc]
    """``LlamaForTokenClassification`` likewise."""


class SparseQwen2ForCausalLM(_SparseQwen2, Qwen2ForCausalLM):  # type: ignore[misc]
    """``Qwen2ForCausalLM`` likewise; see ``SparseQwen2Config``."""


class SparseQwen2Model(_SparseQwen2, Qwen2Model):  # type: ignore[misc]
    """``Qwen2Model`` likewise: the body of ``SparseQwen2ForCausalLM``, whose files it reads."""


class SparseQwen2ForSequenceClassification(_SparseQwen2, Qwen2ForSequenceClassification):  # type: ignore[misc]
    """``Qwen2ForSequenceClassification`` likewise: a classifier or, with ``num_labels=1``, a reward model."""


class SparseQwen2ForTokenClassification(_SparseQwen2, Qwen2ForTokenClassification):  # type: ignore[misc]
    """``Qwen2ForTokenClassification`` likewise."""


for _config in (SparseLlamaConfig, SparseQwen2Config):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
for _auto, _model in (
    (AutoModel, SparseLlamaModel),
    (AutoModel, SparseQwen2Model),
    (AutoModelForCausalLM, SparseLlamaForCausalLM),
    (AutoModelForCausalLM, SparseQwen2ForCausalLM),
    (AutoModelForSequenceClassification, SparseLlamaForSequenceClassification),
    (AutoModelForSequenceClassification, SparseQwen2ForSequenceClassification),
    (AutoModelForTokenClassification, SparseLlamaForTokenClassification),
    (AutoModelForTokenClassification, SparseQwen2ForTokenClassification),
):
    _auto.register(_model.config_class, _model, exist_ok=True)
