"""What the plug-ins for serving engines share: configurations and weights of sparse checkpoints, and refusals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from twell import _admission, _auto
from twell.integrations import layouts

# Architectures that always have ReLU: transformers' class of configuration, the model types, the stock architecture.
SPARSE = {
    "SparseLlamaForCausalLM": ("LlamaConfig", ("sparse_llama", "llama_sparse_relu"), "LlamaForCausalLM"),
    "SparseQwen2ForCausalLM": ("Qwen2Config", ("sparse_qwen2", "qwen2_sparse_relu"), "Qwen2ForCausalLM"),
}

# Activations of layers with a gate that are served, by their names in configurations and in ``torch.ops.twell.ffn``.
ACTIVATIONS = ("relu", "relu2", *layouts.OWN)

# Tokens of a typical batch that decodes, and of one with prompts; figures count for the numbers nearest to them.
BATCH, PROMPTS = 256, 8192
# Most tokens that are nearer to the former, by powers of two.
_MOST_BATCH = 1024


def union(figures: layouts.LayerFigures, m: int) -> float:
    """The union by which "auto" chooses for ``m`` tokens before it has measured any."""
    return figures.batch if m <= _MOST_BATCH else figures.text


def read_configurations() -> None:
    """Let transformers read configurations of sparse models as the stock model's, with all their keys."""
    for stock, model_types, _ in SPARSE.values():
        for model_type in model_types:
            _read_as(model_type, stock)


def _read_as(model_type: str, stock: str) -> None:
    import transformers

    base = getattr(transformers, stock)

    def from_dict(cls: Any, config_dict: dict[str, Any], /, **kwargs: Any) -> Any:
        return base.from_dict({**config_dict, "model_type": base.model_type}, **kwargs)

    reader = type(f"{stock}Of_{model_type}", (base,), {"model_type": model_type, "from_dict": classmethod(from_dict)})
    transformers.AutoConfig.register(model_type, reader, exist_ok=True)


def is_sparse(config: Any) -> bool:
    """Whether a configuration names one of the ``SPARSE`` architectures."""
    return bool(set(config.architectures or ()) & set(SPARSE))


def correct(config: Any) -> str:
    """Make the configuration of a model say what its layers compute; return what was wrong, "" for nothing.

    The ``SPARSE`` architectures have ReLU, or one of ``layouts.OF_SPARSE`` that their configuration names; others what
    theirs names. Raises NotImplementedError for layers without a gate.
    """
    text = config.get_text_config()
    content = text.to_dict()
    if not content.get("sparsity_gated_mlp", True):
        raise NotImplementedError("layers served through twell must have a gate, got sparsity_gated_mlp = False")
    if (size := layouts.intermediate_size(content)) is not None:
        text.intermediate_size = size
    stated = layouts.activation(content)
    if stated in ("relu", *layouts.OF_SPARSE) or not is_sparse(config):
        return ""
    for key in layouts.ACTIVATIONS:
        if isinstance(content.get(key), str):
            setattr(text, key, "relu")
    return f"the layers apply ReLU; the configuration says {stated!r}, which is ignored"


def as_linear(weights: Iterable[tuple[str, Tensor]], config: Any) -> Iterator[tuple[str, Tensor]]:
    """Turn down weights that are stored by rows of neurons to those of nn.Linear.

    Raises ValueError, with the name of the weight, for one of another shape.
    """
    sizes, content = (config.hidden_size, config.intermediate_size), config.to_dict()
    for name, weight in weights:
        if layouts.is_down(name):
            try:
                layout = layouts.down_layout(weight.shape, *sizes, content)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            weight = weight.t() if layout == "rows" else weight
        yield name, weight


def why_not(down: Tensor) -> str:
    """Why the kernels cannot take a layer with this down weight [K, N]; "" if they can."""
    if down.dtype not in _auto.PACKED_DTYPES:
        return f"weights must be bfloat16 or float16, got {down.dtype}"
    try:
        _admission.require_sizes("sizes of a rank", down.shape[1], down.shape[0])
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def lay_out_by_rows(layer: Any) -> None:
    """Store ``layer.weight`` [K, N] as the transposed view of a contiguous [N, K] tensor, which the kernels read."""
    layer.weight.data = layer.weight.data.t().contiguous().t()
