"""Models of Hugging Face transformers with their feed-forward layers through twell. ``pip install 'twell[hf]'``.

``sparsify`` converts a model, new or not; ``load`` opens saved ones::

    import twell.integrations.transformers as twell_hf
    model = twell_hf.sparsify(AutoModelForCausalLM.from_pretrained("facebook/opt-125m"))
    model = twell_hf.sparsify(LlamaForCausalLM(LlamaConfig(hidden_act="relu")))  # sparse from the start
    model = twell_hf.load("runs/relu/final")  # any saved causal model with ReLU, squared ReLU, dReLU or FATReLU
    model = twell_hf.load("SakanaAI/SparseLM0.5B", dtype=torch.bfloat16)  # and the paper's, in the stock class

``down_proj.weight`` is [hidden, intermediate] in files and in memory, as in the stock classes, so files load either
way. A ``device_map`` may spread the model over GPUs, but not offload it. docs/serving.md has ``generate``.
"""

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from twell.base.activation import Activation
from twell.call.functional import Strategy
from twell.integrations import layouts
from twell.integrations import sparsify as _sparsify
from twell.nn import configuration, down_layout, record
from twell.nn.compaction import Compaction
from twell.nn.float8 import Float8MLP
from twell.runtime.log import logger

try:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
    from transformers.modeling_utils import load_state_dict
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
except ImportError:
    raise ImportError("twell.integrations.transformers needs transformers: pip install 'twell[hf]'") from None

# after transformers, since its own message about a missing one is another
from twell.integrations import experts as stacked
from twell.integrations._trainer import SparsityCallback

__all__ = ["SparsityCallback", "load", "sparsify"]

# Arguments of from_pretrained that say where files are; the configuration is read with the same ones.
_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")

# The ends of names that scales of quantised weights have in files.
_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2")

# The end of the name that the mask of a compacted layer has in files; version 0.3 wrote the removed rows beside it.
_KEPT = ".compaction.kept"


def sparsify(
    model: Any,
    *,
    activation: Literal["relu", "relu2", "drelu"] | None = None,
    filter_fn: _sparsify.Filter | None = None,
    compression: int = 8,
    strategy: Strategy = "auto",
    names: _sparsify.Names | None = None,
) -> Any:
    """Run the feed-forward layers of ``model`` through twell, in place; return ``model``.

    It is a ``PreTrainedModel``, or a ``PeftModel`` around one, whose names count. Layers have ReLU, squared ReLU, dReLU
    or FATReLU; architectures are those in the table of the page on models, with and without a head.
    ``twell.sparsify_``, which it calls, documents what is taken and the arguments. ``save_pretrained`` writes the files
    of the stock class.

    A model with another activation, mostly SiLU, is refused, since its hidden state has no zeros. With
    ``activation="relu"``, "relu2" or "drelu" the model gets that one, to be trained with it, and so does its
    configuration: ``from_pretrained`` of the stock class then computes the same or, with "drelu", which no stock class
    has, raises; ``load`` reads the files of causal models. The key in the configuration is found by building the model
    from it on ``meta``. ValueError without one, and if it makes other modules, too, as layers that ``filter_fn`` leaves
    out and experts stacked in one tensor. A head that reads it when it runs, as classifiers of BigBird, Funnel and
    Nystromformer do, follows it. "fatrelu" begins as "relu": ``twell.recipe.TargetThreshold`` trains its threshold.

    Whatever is set later, ``save_pretrained`` writes what the layers are then: their activation at its key of the
    configuration, and a record of them, ``twell``, by which ``load`` takes the same ones.

    Of a mixture of experts the dense layers, shared experts and experts that are modules are taken. So are routed
    experts stacked in one tensor, whose activation is of the family as it is: they run ``twell.sparse_experts``, by
    ``strategy`` "auto", "dense" or "row". Their down weights are laid by rows if the model is in ``eval`` mode.

    Raises TypeError or ValueError and changes nothing, as ``twell.sparsify_``.
    """
    outer = model
    if "peft.peft_model.PeftModel" in (f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        got = f"got {type(model).__name__}; compile it afterwards, and use twell.sparsify_ for other modules"
        raise TypeError(f"sparsify: model must be a transformers.PreTrainedModel, {got}")
    experts = [each for name, each in stacked.found(model) if filter_fn is None or filter_fn(each, name)]
    try:
        planned = _sparsify.plan(model, filter_fn, activation, strategy, names, experts)
    except ValueError as error:
        if reason := stacked.left(model):
            raise ValueError(f"{error}; {reason}") from None
        raise
    changed = [candidate for candidate in planned.candidates if candidate.was is not None]
    named = _keys_of(model, planned.candidates) if changed else {}
    _sparsify.apply(model, planned, compression, strategy)
    stacked.serve(model, experts, strategy, compression)
    for key, new in named.items():
        key.write(model.config, new)
    _settle(model)
    return outer


def _settle(model: Any) -> None:
    """See to layers that were made just now."""
    layers = _sparsify.layers(model).values()
    for layer in (*layers, *_sparsify.layers(model, Float8MLP).values()):
        for module in layer.modules():
            # transformers would initialise modules without this mark when more weights are loaded later
            module._is_hf_initialized = True
    down_layout.lay(layers)


def _keys_of(model: Any, candidates: list[_sparsify.Candidate]) -> dict[configuration.Key, Activation]:
    """What keys of the configuration name once the candidates are layers. Raises ValueError as ``sparsify``."""
    # of a pair its activation alone
    names = {f"{c.name}.{c.attribute if c.kind == 'pair' else ''}".strip("."): c for c in candidates if not c.steps}
    layers = record.activations(model) | {name: each.activation for name, each in names.items()}
    try:
        named, left = configuration.keys_of(model, layers)
        if why := next((left[name] for name, each in names.items() if each.was is not None and name in left), ""):
            raise ValueError(why)
    except ValueError as error:
        raise ValueError(
            f"sparsify: a new activation must have a key of the configuration: {error}. twell.sparsify_ changes it all "
            "the same; save_pretrained then records it for load alone, and the stock class has the old one"
        ) from error
    return named


def load(model: str | Path, *, strategy: Strategy | None = None, compression: int | None = None, **options: Any) -> Any:
    """The causal model in a folder or on the Hub, with its feed-forward layers through twell.

    As ``sparsify(AutoModelForCausalLM.from_pretrained(model, **options))``, of the layers that ``save_pretrained``
    recorded, if it did, and compacted where they were. It also reads configurations that name an activation which no
    stock class has: "drelu", and "fatrelu" with its threshold as ``hidden_act_param``, as MiniCPM-S names it. Layers of
    twell that the model's class makes stay as they are. With ``trust_remote_code`` a folder's own code reads its own
    configuration, and what its modules compute decides.

    Files of the paper's code, and those of the sparse classes of twell 0.3, open in ``LlamaForCausalLM`` and
    ``Qwen2ForCausalLM``: with ReLU, whatever stock activation ``hidden_act`` names, and with the neurons that
    ``sparsity_new_intermediate_size`` says. Their down weights may be [hidden, intermediate] or [intermediate, hidden],
    which the shape tells. ``save_pretrained`` then writes files of the stock class.

    ``strategy`` and ``compression`` are those of ``sparsify``; None is what the configuration says, by the keys
    ``sparsity_strategy``, ``sparsity_screen``, ``sparsity_invariant`` and ``sparsity_compression``, else the default.
    For its other arguments call ``sparsify`` itself. ``options`` are those of ``from_pretrained`` except for fields of
    the configuration. Raises as ``from_pretrained`` and ``sparsify``; FileNotFoundError for a folder that neither
    exists nor is on the Hub; ValueError for a "fatrelu" without a threshold, for layers of a sparse class that have no
    gate or square down weights, for a record of other layers than the model has, for a compacted layer with other
    neurons than its mask, and for files without weights of the body, with another head, or with scales that
    transformers leaves out.
    """
    if not Path(model).exists() and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(model)):
        raise FileNotFoundError(
            f"load: model must be a folder or the name of one on the Hub, got {str(model)!r}, which does not exist"
        )
    try:
        opened = open_saved(model, **options)
    except OSError as error:
        if Path(model).exists():
            raise
        raise FileNotFoundError(
            f"load: model {str(model)!r} is no folder here, and the Hub has none: {error}"
        ) from error
    given = {"strategy": strategy, "compression": compression}
    return opened.with_layers(**{name: value for name, value in given.items() if value is not None})


class Opened(NamedTuple):
    """A saved model in its stock class, and what its files say of its layers.

    own: the activations that no stock class has, by the keys that named them. entries: its record, or None.
    """

    model: Any
    own: dict[configuration.Key, Activation]
    entries: list[record.Entry] | None
    settings: dict[str, Any]
    compactions: dict[str, Compaction]

    def with_layers(self, **options: Any) -> Any:
        """The model with its layers through twell, as they were saved. Raises as ``load``."""
        model, settings = self.model, self.settings | options
        if not _sparsify.layers(model):
            given: Any = {name: settings[name] for name in ("strategy", "compression") if name in settings}
            if self.entries is None:
                sparsify(model, **given)
            else:
                self._take(self.entries, given)
        layers = _sparsify.layers(model)
        for layer in layers.values():
            for name, value in settings.items():
                setattr(layer, name, value)
        self._give(layers)
        for name, compaction in self.compactions.items():
            if (kept := int(compaction.kept.sum())) != layers[name].intermediate:
                raise ValueError(
                    f"load: {name} must have the {kept} neurons of its mask, got {layers[name].intermediate}"
                )
            layers[name].compaction = compaction.train(model.training).to(layers[name].down_proj.weight.device)
        _settle(model)
        return model

    def _take(self, entries: list[record.Entry], options: dict[str, Any]) -> None:
        """Run the layers of the record through twell, and no others. Raises ValueError if one is not there."""
        options |= {"names": list(dict.fromkeys(entry.names for entry in entries if entry.names)) or None}
        for own in (True, False):
            mine = [entry for entry in entries if own is (entry.activation is not None)]
            more: Any = {**options, "filter_fn": lambda _, name, mine=mine: any(entry.has(name) for entry in mine)}
            if mine and own:
                # the configuration does not name it
                _sparsify.sparsify_(self.model, activation="relu", **more)
            elif mine:
                sparsify(self.model, **more)
        made = [module for module, _ in record.layers(self.model)]
        for entry in entries:
            lost = [each for each in entry.modules if not any(map(entry._replace(modules=(each,)).has, made))]
            if lost:
                raise ValueError(
                    f"load: a model must have the layers of its record, got none that is {lost[0]}: take the key "
                    f'"{configuration.RECORD_KEY}" out of the configuration to load the model without it'
                )

    def _give(self, layers: dict[str, Any]) -> None:
        """Give layers the activation of the record, or that which a key of the configuration has named for them."""
        model, own = self.model, self.own
        if own and any(isinstance(module, Float8MLP) for module in model.modules()):
            # they have the stock activation, and cannot change it
            raise NotImplementedError(
                f"load: layers in e4m3 must have ReLU or its square, got {next(iter(own.values())).name}: load files "
                "in 16 bits, and quantise the model"
            )
        alone = len(configuration.keys_naming(model.config, configuration.FAMILY)) == len(own) == 1
        made = {} if alone or not own else configuration.made_by(model)[0]
        for name, layer in layers.items():
            found = record.layer_of(name, layer)
            entry = next((each for each in self.entries or () if found is not None and each.has(found.module)), None)
            new = entry.activation if entry else None
            if new is None and own and found is not None and found.activation is not None:
                act = found.act
                keys = [key for key, names in made.items() if any(configuration.is_within(each, act) for each in names)]
                new = next((own[key] for key in keys if key in own), None if keys else next(iter(own.values())))
            if new is not None:
                give(layer, new)
        for key, named in own.items():
            key.write(model.config, named)


def open_saved(model: str | Path, dequantize: bool = False, **options: Any) -> Opened:
    """The causal model in a folder or on the Hub before its layers run through twell, and what its files say of them.

    ``dequantize``: weights in e4m3 to 16 bits. Raises as ``load``.
    """
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
    settings = layouts.settings_of(vars(config.get_text_config()))
    own_code = own_code and bool(options.get("trust_remote_code"))
    if causal is not None and isinstance(text := config.get_text_config(), causal.config_class):
        # as transformers, which makes a part of some models
        config = text
    own = {} if own_code else configuration.as_stock(config)
    entries = record.read(config)
    stored = getattr(config, "quantization_config", None)
    # methods that may have weights in e4m3
    if dequantize and isinstance(stored, dict) and stored.get("quant_method") in ("fp8", "compressed-tensors"):
        config.quantization_config = stored | {"dequantize": True}
    options |= {"config": config, "output_loading_info": True}
    found: dict[str, Compaction] = {}
    # transformers converts names, and fills buffers, of its own modules' classes alone
    reader: Any = causal and type(
        causal.__name__, (_Reader, causal), {"_found": found, "__module__": causal.__module__}
    )
    loaded, about = (reader or AutoModelForCausalLM).from_pretrained(model, **options)
    if causal is not None:
        loaded.__class__ = causal
        # the marker is of files
        vars(loaded.config).pop(layouts.LAYOUT_KEY, None)
    require_read(loaded, about)
    return Opened(loaded, own, entries, settings, found)


def read_configuration(model: str | Path, where: dict[str, Any]) -> Any:
    """The configuration of a model; that of a sparse one as its stock class has it, with the marker of its files."""
    content, _ = transformers.LlamaConfig.get_config_dict(model, **where)
    stock = layouts.stock_of_sparse(content)
    if stock is None:
        return AutoConfig.from_pretrained(model, **where)
    fields = layouts.as_stock(content) | {"name_or_path": str(model)}
    return getattr(transformers, stock).from_dict(fields)


class _Reader:
    """A class with this base reads files that the stock one cannot: compacted, or by rows."""

    _found: dict[str, Compaction]
    _keys_to_ignore_on_load_unexpected = (r"\.compaction\.(kept|removed)$",)

    @classmethod
    def _load_pretrained_model(
        cls, model: Any, state_dict: dict[str, Tensor] | None, checkpoint_files: list[str] | None, *args: Any, **kw: Any
    ) -> Any:
        # both versions of transformers call this once files are found and the model is on meta
        def read(device: str) -> dict[str, Tensor]:
            files = (load_state_dict(file, map_location=device) for file in checkpoint_files or ())
            return state_dict or {name: tensor for file in files for name, tensor in file.items()}

        stored = read("meta")
        if any(name.endswith(_KEPT) for name in stored):
            _fit(model, stored)
            masks = {name: tensor for name, tensor in read("cpu").items() if name.endswith(_KEPT)}
            cls._found |= {name.removesuffix(_KEPT): Compaction(mask) for name, mask in masks.items()}
        if hasattr(model.config, layouts.LAYOUT_KEY) and (rows := _rows(model, stored)):
            logger.info("%d down weights are stored [intermediate, hidden]", len(rows))
            whole = read("cpu")
            state_dict = {**whole, **{name: whole[name].t().contiguous() for name in rows}}
        return super()._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kw)  # type: ignore[misc]


def _fit(model: Any, stored: dict[str, Tensor]) -> None:
    """Give the projections of a model on meta the shapes that their weights have in files."""
    for name, linear in model.named_modules():
        weight = stored.get(f"{name}.weight")
        if isinstance(linear, nn.Linear) and weight is not None and weight.shape != linear.weight.shape:
            linear.out_features, linear.in_features = weight.shape
            linear.weight = nn.Parameter(linear.weight.new_empty(weight.shape))
            if linear.bias is not None:
                linear.bias = nn.Parameter(linear.bias.new_empty(weight.shape[0]))


def _rows(model: Any, stored: dict[str, Tensor]) -> list[str]:
    """The down weights that files store [intermediate, hidden]. Raises ValueError as ``layouts.lies_by_rows``."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    found, marked = [], getattr(model.config, layouts.LAYOUT_KEY) == "rows"
    for name in filter(layouts.is_down, stored):
        shape = shapes.get(name, shapes.get(f"{model.base_model_prefix}.{name}"))
        # save_pretrained of a compacted model writes nn.Linear's layout
        compacted = not marked and f"{name.rsplit('.', 2)[0]}{_KEPT}" in stored
        if shape is not None and not (compacted and shape == stored[name].shape):
            found += [name] * layouts.lies_by_rows(stored[name].shape, *shape, name=name)
    if found and getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"{found[0]}: quantised weights must be [hidden, intermediate], got [intermediate, hidden]")
    return found


def require_read(model: Any, about: dict[str, Any]) -> None:
    """Raise ValueError if ``from_pretrained`` has left out weights of the body, another head, or scales."""
    if lost := [name for name in about["missing_keys"] if name.endswith(_SCALES)]:
        raise ValueError(f"each weight in e4m3 must have its scales, got none for {min(lost)}")
    # transformers draws missing weights; a head may be new where files have no other
    lost = [name for name in about["missing_keys"] if name.startswith(f"{model.base_model_prefix}.")]
    if lost := lost or (about["unexpected_keys"] and list(about["missing_keys"])):
        raise ValueError(f"files must have all weights, got none for {', '.join(sorted(lost)[:3])}")
    left = [name for name in about["unexpected_keys"] if name.endswith(_SCALES)]
    if left:
        raise ValueError(
            f"each scale of a weight must be read, got {min(left)} and {len(left) - 1} more that transformers leaves "
            "out, as those of ModelOpt, and weight_scale of quant_method fp8: take a checkpoint in bfloat16, or in "
            "e4m3 as FP8_DYNAMIC of compressed-tensors"
        )


def give(layer: Any, activation: Activation) -> None:
    """Give a layer another activation of the family."""
    layer.threshold = 0
    layer.activation = activation.name
    layer.threshold = activation.threshold


record.watch()
