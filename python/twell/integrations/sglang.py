"""twell in SGLang, experimental: no engine has run it, only stand-ins made from the interface of SGLang 0.5.23.

SGLang calls ``register``, an entry point of its group ``sglang.srt.plugins``, in each of its processes. It hooks what
refuses ReLU: the layers of SGLang's own Llama and Qwen2, where a configuration names ReLU, and for
``SparseLlamaForCausalLM`` and ``SparseQwen2ForCausalLM`` the configuration and the loading of down weights. Layers are
built as for SiLU; then the down projection, asked for its product, computes the whole layer through
``torch.ops.twell.ffn`` with strategy "auto", and reduces over ranks as always.

There is no other way to serve ReLU there. So with LoRA, quantised weights and sizes that the kernels do not take,
building a layer raises NotImplementedError. ``TWELL_SGLANG=off`` switches it off; other models have no part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from twell._runtime import env
from twell._runtime.log import info_once, logger
from twell.integrations import engines

__all__ = ["register"]

_MODELS = "sglang.srt.models"


@functools.cache
def register() -> None:
    """Register the hooks with SGLang in this process; again without effect. Nothing with ``TWELL_SGLANG=off``.

    Raises ImportError without SGLang, ValueError for another value of ``TWELL_SGLANG``.
    """
    if not env.sglang():
        logger.info("TWELL_SGLANG=off: SGLang serves without twell")
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    engines.read_configurations()
    hooks = {
        "sglang.srt.utils.hf_transformers.config.get_config": _read,
        f"{_MODELS}.llama.LlamaMLP.__init__": _build,
        f"{_MODELS}.qwen2.Qwen2MLP.__init__": _build,
        f"{_MODELS}.llama.LlamaForCausalLM.load_weights": _load,
        f"{_MODELS}.qwen2.Qwen2ForCausalLM.load_weights": _load,
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _read(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Read a configuration; a sparse one becomes that of the stock architecture with ReLU."""
    config = original(*args, **kwargs)
    if engines.is_sparse(config):
        if wrong := engines.correct(config):
            info_once(wrong)
        config.architectures = [engines.SPARSE.get(name, (None, None, name))[2] for name in config.architectures]
        config.twell_stored = True
    return config


def _load(original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Tensor]], *args: Any) -> Any:
    """Load weights; those of a sparse checkpoint may be stored by rows of neurons."""
    if getattr(model.config, "twell_stored", False):
        weights = engines.as_linear(weights, model.config)
    return original(model, weights, *args)


def _build(
    original: Callable[..., None],
    mlp: Any,
    hidden_size: int,
    intermediate_size: int,
    hidden_act: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Build a layer; one with ReLU as for SiLU, which is all that the stock class takes, then to be twell's."""
    if hidden_act != "relu":
        original(mlp, hidden_size, intermediate_size, hidden_act, *args, **kwargs)
        return
    original(mlp, hidden_size, intermediate_size, "silu", *args, **kwargs)
    if reason := _why_not(mlp):
        raise NotImplementedError(f"SGLang serves layers with ReLU through twell alone, which cannot here: {reason}")
    info_once("feed-forward layers with ReLU run through torch.ops.twell.ffn")
    mlp.down_proj.quant_method = _Whole(mlp.gate_up_proj)
    # of this layer alone: others keep the method of their class
    mlp.forward = functools.partial(_forward, mlp)


def _why_not(mlp: Any) -> str:
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    if arguments.enable_lora or (arguments.enable_lora is None and arguments.lora_paths):
        return "LoRA is enabled"
    for layer in (mlp.gate_up_proj, mlp.down_proj):
        if (name := type(layer.quant_method).__name__) != "UnquantizedLinearMethod":
            return f"weights must not be quantised, got {name}"
    return engines.why_not(mlp.down_proj.weight)


def _forward(mlp: Any, x: Tensor, forward_batch: Any = None) -> Tensor:
    y: Tensor = mlp.down_proj(x, forward_batch=forward_batch)[0]
    return y


class _Whole:
    """The method of a down projection that computes the whole layer, from the layer's input x [tokens, K]."""

    def __init__(self, merged: Any) -> None:
        self._merged = merged

    def process_weights_after_loading(self, layer: Any) -> None:
        """Lay the down weight out by rows of neurons; again without effect."""
        engines.lay_out_by_rows(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y [tokens, K] of the neurons of this rank."""
        w_gate, w_up = self._merged.weight.chunk(2)
        y: Tensor = torch.ops.twell.ffn(
            x.reshape(-1, x.shape[-1]), w_gate, w_up, layer.weight.t(), None, None, bias, 8, "auto", w_gate
        )
        return y.view(x.shape)
