"""The model of ``twell.integrations.vllm``: vLLM's Transformers backend with its ReLU FFNs through ``ops.ffn``.

vLLM traces a model once, with a symbolic number of tokens, and captures CUDA graphs of many sizes. So a layer is one
operator, which sees the real number of tokens and chooses its strategy then. Its linear layers stay vLLM's: they hold,
load and shard the weights, gate and up as one [2 N, K] of a rank's halves. Only their products are not called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import vllm.envs
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.models.transformers import TransformersForCausalLM

from twell import _admission, _auto, tuning
from twell.integrations import layouts
from twell.integrations.vllm import SPARSE

# vLLM sets up the logs below its own name alone
_logger = init_logger("vllm.twell")


class SparseForCausalLM(TransformersForCausalLM):  # type: ignore[misc]
    """A model of transformers in vLLM whose ReLU FFNs run through twell.

    Layers that cannot (LoRA, quantised weights, 32-bit weights, sizes that the kernels do not take, batch-invariant
    mode, other activations) run as in ``TransformersForCausalLM``; the log has one line for each reason.

    Raises NotImplementedError for a configuration without gates, ValueError for a strategy that does not exist.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        _correct(vllm_config.model_config.hf_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def recursive_replace(self) -> None:
        """Replace the modules of transformers by vLLM's, then the FFNs among them by ``ServedMLP``."""
        found = [name for name, module in self.model.named_modules() if _is_reglu(module)]
        super().recursive_replace()
        reasons: Counter[str] = Counter()
        for name in found:
            stock = self.model.get_submodule(name)
            reason = why_not(stock, self.vllm_config)
            if reason:
                reasons[reason] += 1
            else:
                self.model.set_submodule(name, ServedMLP(stock, self.text_config))
        if not found:
            reasons["no layer is down_proj(relu(gate_proj(x)) * up_proj(x))"] += 1
        for reason, count in reasons.items():
            _logger.warning("twell: %d feed-forward layers run as without twell: %s", count, reason)
        if served := len(found) - sum(reasons.values()):
            _logger.info("twell: %d feed-forward layers run through torch.ops.twell.ffn", served)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As in vLLM; down weights of the paper's architectures may also be stored [intermediate, hidden]."""
        if set(self.config.architectures or ()) & set(SPARSE):
            weights = self._as_linear(weights)
        return super().load_weights(weights)  # type: ignore[no-any-return]

    def _as_linear(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Turn down weights that are stored by rows. Raises ValueError for one of another shape."""
        config = self.text_config
        for name, weight in weights:
            if layouts.is_down(name):
                sizes = config.hidden_size, config.intermediate_size
                try:
                    layout = layouts.down_layout(weight.shape, *sizes, config.to_dict())
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
                weight = weight.t() if layout == "rows" else weight
            yield name, weight


class ServedMLP(nn.Module):
    """``down(relu(gate(x)) * up(x))`` of one rank, through ``torch.ops.twell.ffn``, and the sum over ranks.

    It takes the linear layers of ``stock`` over, under their names. ``process_weights_after_loading`` of the down
    projection, which vLLM calls, lays its weight out by rows of neurons.
    """

    def __init__(self, stock: nn.Module, config: Any) -> None:
        super().__init__()
        self._merged, merged = _linear(stock, MergedColumnParallelLinear)
        self._down, down = _linear(stock, RowParallelLinear)
        merged.quant_method, down.quant_method = _Kept(), _KeptByRows()
        self.add_module(self._merged, merged)
        self.add_module(self._down, down)
        self.strategy = str(getattr(config, "sparsity_strategy", "auto"))
        self.compression = int(getattr(config, "sparsity_compression", 8))
        tuning.require_strategy(self.strategy)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> y [..., hidden]."""
        merged, down = getattr(self, self._merged), getattr(self, self._down)
        w_gate, w_up = merged.weight.chunk(2)
        b_gate, b_up = (None, None) if merged.bias is None else merged.bias.chunk(2)
        # one rank alone adds it
        b_down = None if down.tp_rank > 0 else down.bias
        y: Tensor = torch.ops.twell.ffn(
            x.reshape(-1, x.shape[-1]),
            w_gate,
            w_up,
            down.weight.t(),
            b_gate,
            b_up,
            b_down,
            self.compression,
            self.strategy,
            w_gate,
        ).view(x.shape)
        if down.tp_size > 1:
            y = tensor_model_parallel_all_reduce(y)
        return y


class _Kept(UnquantizedLinearMethod):  # type: ignore[misc]
    """Keeps a weight as it was loaded; on a CPU vLLM would pack it for its own products."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave ``layer.weight`` alone."""


class _KeptByRows(UnquantizedLinearMethod):  # type: ignore[misc]
    """Lays a down weight [K, N] out by rows of neurons, which the kernels read; its shape stays."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Store ``layer.weight`` as the transposed view of a contiguous [N, K] tensor."""
        layer.weight.data = layer.weight.data.t().contiguous().t()


def why_not(stock: nn.Module, vllm_config: Any) -> str:
    """Why a ReLU FFN, after vLLM replaced its linear layers, runs as without twell; "" if it need not."""
    if vllm_config.lora_config is not None:
        return "LoRA is enabled"
    if vllm.envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and a strategy depends on the number of tokens"
    try:
        linears = [_linear(stock, kind)[1] for kind in (MergedColumnParallelLinear, RowParallelLinear)]
    except ValueError as error:
        return str(error)
    if quantised := [layer for layer in linears if type(layer.quant_method) is not UnquantizedLinearMethod]:
        return f"weights must not be quantised, got {type(quantised[0].quant_method).__name__}"
    weight = linears[1].weight
    if weight.dtype not in _auto.PACKED_DTYPES:
        return f"weights must be bfloat16 or float16, got {weight.dtype}"
    try:
        _admission.require_sizes("sizes of a rank", weight.shape[1], weight.shape[0])
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def _linear(stock: nn.Module, kind: type[nn.Module]) -> tuple[str, Any]:
    """The only child of this kind, with its name. Raises ValueError if there is not one."""
    found = [(name, child) for name, child in stock.named_children() if isinstance(child, kind)]
    if len(found) != 1:
        raise ValueError(f"vLLM must have made one {kind.__name__} of a layer, got {len(found)}")
    return found[0]


def _is_reglu(module: nn.Module) -> bool:
    """Whether this is a feed-forward layer of a Llama-like model of transformers, with ReLU."""
    linear = all(isinstance(getattr(module, f"{name}_proj", None), nn.Linear) for name in ("gate", "up", "down"))
    return linear and type(getattr(module, "act_fn", None)) is nn.ReLU


def _correct(config: Any) -> None:
    """Make the configuration of a sparse model say what its layers compute."""
    text = config.get_text_config()
    content = text.to_dict()
    if not content.get("sparsity_gated_mlp", True):
        raise NotImplementedError("vLLM serves gated layers through twell, got sparsity_gated_mlp = False")
    if (size := layouts.intermediate_size(content)) is not None:
        text.intermediate_size = size
    stated = layouts.activation(content)
    if stated != "relu":
        _logger.info("twell: the layers apply ReLU; the configuration says %r, which is ignored", stated)
        for key in layouts.ACTIVATIONS:
            if isinstance(content.get(key), str):
                setattr(text, key, "relu")
