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
from torch import Tensor, nn
from transformers.activations import ReLUSquaredActivation
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.models.transformers import TransformersForCausalLM

from twell import _configuration
from twell._activation import RELU, Activation
from twell.integrations import layouts, vllm
from twell.strategy.costs import Figures, Problem
from twell.strategy.plan import PACKED_DTYPES, Facts, Route, routed, unpackable
from twell.strategy.site import AutoStrategy, Screen, enroll

# vLLM sets up the logs below its own name alone
_logger = init_logger("vllm.twell")


class SparseForCausalLM(TransformersForCausalLM):  # type: ignore[misc]
    """A model of transformers in vLLM whose ReLU FFNs run through twell.

    Layers that cannot (LoRA, quantised weights, 32-bit weights, sizes that the kernels do not take, other activations)
    run as in ``TransformersForCausalLM``; the log has one line for each reason. With dReLU and FATReLU, which only
    twell has, they raise.

    Raises NotImplementedError for a configuration without gates, and for layers that only twell could run and cannot;
    ValueError for a configuration whose strategy, compression, figures or threshold do not exist.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        if wrong := vllm.correct(config):
            _logger.info("twell: %s", wrong)
        # of an activation that no stock class has: the model is made with ReLU
        own = _configuration.as_stock(config)
        self._activation = RELU if own is None else own.activation
        try:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        finally:
            if own is not None:
                _configuration.write(config, own.keys, own.activation)

    def recursive_replace(self) -> None:
        """Replace the modules of transformers by vLLM's, then the FFNs among them by ``ServedMLP``."""
        activations = {name: activation_of(module) for name, module in self.model.named_modules()}
        found = [name for name, activation in activations.items() if activation]
        if self._activation != RELU:
            self._require(len(found) == self.text_config.num_hidden_layers, f"{len(found)} layers of twell's form")
        super().recursive_replace()
        reasons: Counter[str] = Counter()
        for name in found:
            stock = self.model.get_submodule(name)
            reason = why_not(stock, self.vllm_config)
            if self._activation != RELU:
                self._require(not reason, f"{name}: {reason}")
            if reason:
                reasons[reason] += 1
            else:
                activation = Activation(activations[name]) if self._activation == RELU else self._activation
                served = ServedMLP(stock, self.text_config, self._site(name), activation)
                self.model.set_submodule(name, served)
        if not found:
            reasons["no layer is down_proj(act(gate_proj(x)) * up_proj(x)) with ReLU or its square"] += 1
        for reason, count in reasons.items():
            _logger.warning("twell: %d feed-forward layers run as without twell: %s", count, reason)
        if count := len(found) - sum(reasons.values()):
            _logger.info("twell: %d feed-forward layers run through torch.ops.twell.ffn", count)

    def _require(self, right: bool, got: str) -> None:
        """Raise NotImplementedError if a layer would run without twell, whose code alone has the activation."""
        if not right:
            raise NotImplementedError(
                f"twell must run all {self.text_config.num_hidden_layers} feed-forward layers of a model with "
                f"{self._activation.name}, which vLLM does not have, got {got}"
            )

    def _site(self, name: str) -> ServedStrategy:
        """The strategy of the layer of this name, with the figures that the configuration has for it."""
        known = layouts.measured(self.text_config.to_dict(), self.text_config.num_hidden_layers)
        number = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        figures = None if known is None or number is None else known[number]
        screens = layouts.route_of(vars(self.text_config)).screen
        return ServedStrategy(self.vllm_config.compilation_config, figures, "auto" if screens else "off")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As in vLLM; down weights of the paper's architectures may also be stored [intermediate, hidden]."""
        if vllm.is_sparse(self.config):
            weights = _as_linear(weights, self.text_config)
        return super().load_weights(weights)  # type: ignore[no-any-return]


def _as_linear(weights: Iterable[tuple[str, Tensor]], config: Any) -> Iterator[tuple[str, Tensor]]:
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


class ServedStrategy(AutoStrategy):
    """ "auto" of a served layer: it learns from requests, and not from the runs that vLLM makes while it starts.

    In these all tokens are the same, and so are their neurons. Graphs are captured then, so until a request has been
    measured the choice is by ``figures`` of the configuration or, without, as for any layer not yet measured.
    """

    def __init__(self, compilation: Any, figures: layouts.LayerFigures | None, screen: Screen = "auto") -> None:
        super().__init__(screen=screen)
        self._compilation, self._known = compilation, figures

    def heeds(self, x: Tensor) -> bool:
        """Whether ``x`` is of requests: numbers of tokens that have a graph run as such once vLLM has started."""
        graphs = self._compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE)
        most = (self._compilation.max_cudagraph_capture_size or 0) if graphs else 0
        return len(x) > most and is_forward_context_available() and get_forward_context().attn_metadata is not None

    def learn(self, merged: Tensor, share: int) -> None:
        """Be the strategy of the layer with this weight [2 N, K], of one rank of ``share``."""
        n, k = merged.shape[0] // 2, merged.shape[1]
        enroll(merged, self)
        if self._known is not None:
            nonzeros, text, batch = self._known
            for m, union in ((vllm.BATCH, batch), (vllm.PROMPTS, text)):
                self.observe(Problem(m, k, n, True, False), Figures(nonzeros / share, union))


class ServedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` of one rank, through ``torch.ops.twell.ffn``, and the sum over ranks.

    It takes the linear layers of ``stock`` over, under their names. ``process_weights_after_loading`` of the down
    projection, which vLLM calls, lays its weight out by rows of neurons.
    """

    def __init__(self, stock: nn.Module, config: Any, site: ServedStrategy, activation: Activation) -> None:
        super().__init__()
        self._merged, merged = _linear(stock, MergedColumnParallelLinear)
        self._down, down = _linear(stock, RowParallelLinear)
        merged.quant_method, down.quant_method = _Kept(site), _KeptByRows()
        self.add_module(self._merged, merged)
        self.add_module(self._down, down)
        self.activation, self.route = activation, route_of(config)
        self.compression = int(getattr(config, "sparsity_compression", 8))

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
            self.route.strategy,
            w_gate,
            *self.activation,
            self.route.screen,
            self.route.invariant,
        ).view(x.shape)
        if down.tp_size > 1:
            y = tensor_model_parallel_all_reduce(y)
        return y


class _Kept(UnquantizedLinearMethod):  # type: ignore[misc]
    """Keeps a merged weight as it was loaded; on a CPU vLLM would pack it for its own products."""

    def __init__(self, site: ServedStrategy) -> None:
        super().__init__()
        self._site = site

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave ``layer.weight`` alone, and let the operator find the layer's strategy by it."""
        self._site.learn(layer.weight, layer.tp_size)


class _KeptByRows(UnquantizedLinearMethod):  # type: ignore[misc]
    """Lays a down weight [K, N] out by rows of neurons, which the kernels read; its shape stays."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Store ``layer.weight`` [K, N] as the transposed view of a contiguous [N, K] tensor."""
        layer.weight.data = layer.weight.data.t().contiguous().t()


def route_of(config: Any) -> Route:
    """What the layers of a model run: what its configuration says, in batch-invariant mode "row" with ``invariant``."""
    route = layouts.route_of(vars(config))
    # the bits of the others depend on the number of tokens
    batch_invariant = envs.VLLM_BATCH_INVARIANT and route.strategy != "dense"
    return routed(Facts(strategy="row", invariant=True)) if batch_invariant else route


def why_not(stock: nn.Module, vllm_config: Any) -> str:
    """Why a ReLU FFN, after vLLM replaced its linear layers, runs as without twell; "" if it need not."""
    if vllm_config.lora_config is not None:
        return "LoRA is enabled"
    try:
        linears = [_linear(stock, kind)[1] for kind in (MergedColumnParallelLinear, RowParallelLinear)]
    except ValueError as error:
        return str(error)
    if quantised := [layer for layer in linears if type(layer.quant_method) is not UnquantizedLinearMethod]:
        return f"weights must not be quantised, got {type(quantised[0].quant_method).__name__}"
    down = linears[1].weight
    if down.dtype not in PACKED_DTYPES:
        return f"weights must be bfloat16 or float16, got {down.dtype}"
    refusal = unpackable(Facts("sizes of a rank", n=down.shape[1], k=down.shape[0]), instead="")
    return refusal.message if refusal else ""


def _linear(stock: nn.Module, kind: type[nn.Module]) -> tuple[str, Any]:
    """The only child of this kind, with its name. Raises ValueError if there is not one."""
    found = [(name, child) for name, child in stock.named_children() if isinstance(child, kind)]
    if len(found) != 1:
        raise ValueError(f"vLLM must have made one {kind.__name__} of a layer, got {len(found)}")
    return found[0]


def activation_of(module: nn.Module) -> str:
    """The activation, "relu" or "relu2", of a feed-forward layer of a Llama-like model of transformers.

    "" for any other module.
    """
    linear = all(isinstance(getattr(module, f"{name}_proj", None), nn.Linear) for name in ("gate", "up", "down"))
    found = {nn.ReLU: "relu", ReLUSquaredActivation: "relu2"}.get(type(getattr(module, "act_fn", None)), "")
    return found if linear else ""
