"""twell in vLLM: models with ReLU or another of its family, by ``pip install twell`` beside vLLM.

vLLM calls ``register``, an entry point of its group ``vllm.general_plugins``, in each of its processes. From then on it
serves what docs/serving.md lists: the ``SPARSE`` architectures; those of ``LLAMA_LIKE`` and of vLLM's Transformers
backend with ReLU or another activation of its family; and vLLM's own classes of Nemotron, OPT, Arcee and Jais 2. All
other models, and models with ``model_impl`` "vllm" or "transformers", are as without twell.

Importing this module imports neither vLLM nor CUDA. ``_vllm_model`` has the model, ``_vllm_experts`` routed experts.
"""

import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from twell.integrations import layouts
from twell.nn import configuration, record
from twell.runtime import env, log

__all__ = ["LLAMA_LIKE", "SPARSE", "register"]

# vLLM sets up the logs below its own name alone.
logger = logging.getLogger("vllm.twell")

SPARSE = layouts.SPARSE

# vLLM's version from which the CuTe DSL that it pins is one that twell runs on.
LOWEST = (0, 32)

# Activations that are served, by their names in configurations and in ``torch.ops.twell.ffn``.
ACTIVATIONS = ("relu", "relu2", *configuration.OWN)

# Tokens of a typical batch that decodes, and of one with prompts; figures count for the numbers nearest to them.
BATCH, PROMPTS = 256, 8192

# Architectures with down_proj(act(gate_proj(x)) * up_proj(x)), whose classes in vLLM refuse ReLU and its family.
LLAMA_LIKE = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
)

_OURS = "TwellForCausalLM"
_CLASS = "twell.integrations._vllm_model:SparseForCausalLM"


def register() -> None:
    """Register the models with vLLM in this process; again without effect.

    Does nothing with ``TWELL_VLLM=off`` and, after a warning, with a vLLM older than ``LOWEST``.

    Raises ImportError without vLLM, ValueError for another value of ``TWELL_VLLM``.
    """
    if not env.vllm():
        log.logger.info("TWELL_VLLM=off: vLLM serves without twell")
        return
    import vllm
    from vllm import ModelRegistry

    if is_too_old(vllm.__version__):
        lowest = ".".join(map(str, LOWEST))
        logger.warning("twell: models run as without twell: vLLM must be %s or newer, got %s", lowest, vllm.__version__)
        return
    for architecture in (*SPARSE, _OURS):
        ModelRegistry.register_model(architecture, _CLASS)
    read_configurations()
    # the registry knows classes by the architecture alone, but these two methods see the whole configuration
    for name in ("inspect_model_cls", "resolve_model_cls"):
        method = getattr(ModelRegistry, name)
        if getattr(method, "func", None) is not _instead:
            setattr(ModelRegistry, name, functools.partial(_instead, method))


def is_too_old(version: str) -> bool:
    """Whether this version of vLLM is older than ``LOWEST``. One that is no number, and 0.1.dev, are of a checkout."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (0, 1) != (number := (int(found[1]), int(found[2]))) and number < LOWEST


def _instead(method: Callable[..., Any], architectures: str | Sequence[str], model_config: Any) -> Any:
    """Call a method of vLLM's registry; for a model of the family of ReLU, its class is twell's.

    A Llama-like one has twell's architecture, too, since vLLM's own class refuses it.
    """
    names = [architectures] if isinstance(architectures, str) else list(architectures)
    if model_config.model_impl != "auto" or not _is_served(model_config.hf_config):
        return method(names, model_config)
    found, name = method([_OURS] if set(names) & set(LLAMA_LIKE) else names, model_config)
    if isinstance(found, type):
        # vLLM imports twell's class, so that this module need not
        found = method([_OURS], model_config)[0].served(found)
    return found, name


def _is_served(config: Any) -> bool:
    record.require_named(vars(config))
    return layouts.activation(config.get_text_config().to_dict()) in ACTIVATIONS


def read_configurations() -> None:
    """Let transformers read configurations of sparse models as the stock model's, with all their keys."""
    import transformers

    for name, model_types in SPARSE.values():
        stock = getattr(transformers, name)
        for model_type in model_types:

            def from_dict(cls: Any, config_dict: dict[str, Any], /, stock: Any = stock, **kwargs: Any) -> Any:
                return stock.from_dict({**config_dict, "model_type": stock.model_type}, **kwargs)

            own = {"model_type": model_type, "from_dict": classmethod(from_dict)}
            reader = type(f"{name}Of_{model_type}", (stock,), own)
            transformers.AutoConfig.register(model_type, reader, exist_ok=True)


def is_sparse(config: Any) -> bool:
    """Whether a configuration names one of the ``SPARSE`` architectures."""
    return bool(set(config.architectures or ()) & set(SPARSE))


def correct(config: Any) -> str:
    """Make the configuration of a model say what its layers compute; return what was wrong, "" for nothing.

    The ``SPARSE`` architectures have ReLU, or one of ``OF_SPARSE`` that their configuration names; others what theirs
    names. Raises NotImplementedError for layers without a gate.
    """
    text = config.get_text_config()
    content = text.to_dict()
    if not content.get(layouts.UNGATED_KEY, True):
        raise NotImplementedError("layers served through twell must have a gate, got sparsity_gated_mlp = False")
    if (size := layouts.intermediate_size(content)) is not None:
        text.intermediate_size = size
    said = layouts.ignored(content) if is_sparse(config) else ""
    if said:
        text.hidden_act = "relu"
    return said
