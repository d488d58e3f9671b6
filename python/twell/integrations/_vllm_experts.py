"""Routed experts of models in vLLM through ``torch.ops.twell.experts``.

For a layer of experts that are not quantised vLLM makes an ``UnquantizedFusedMoEMethod``, or the class that is
registered in its place, which is ``RunsExperts``. A layer that twell does not run gets vLLM's own after all. For
quantised ones it makes one of several others, before which twell is not asked: those whose weights are in e4m3 become
``RunsFloat8Experts``, too, before weights are loaded.

vLLM loads and shards the weights, routes and scales, runs shared experts and adds the results of ranks.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

from twell.base.activation import Activation
from twell.choose import tuning
from twell.choose.plan import PACKED_DTYPES, Facts, Route, unpackable
from twell.integrations import _vllm_float8, _vllm_kernels, vllm
from twell.ops.float8 import E4M3
from twell.runtime import geometry, specs

# What vLLM calls the activations of experts with and without a gate.
_ACTIVATIONS = {"relu2": Activation("relu2"), "relu2_no_mul": Activation("relu2")}


class Layers:
    """The layers of experts of a model that is made: how twell runs them, how many, and why not the others."""

    def __init__(self, route: Route, compression: int, on: torch.device) -> None:
        # "union" has no form for experts
        self.route = route._replace(strategy="auto", screen=False) if route.strategy == "union" else route
        self.compression, self._on = compression, on
        self.served = self.float8 = 0
        self.reasons: Counter[str] = Counter()
        self._trouble = functools.cache(
            functools.partial(_vllm_kernels.trouble, self.route, self.compression, self._on, experts=True)
        )

    def take(self, moe: Any) -> Activation | None:
        """The activation of a layer with this ``FusedMoEConfig`` if twell runs it; else note why not."""
        reason, activation = why_not(moe, self.route, self._on), _activation(moe)
        if not reason and activation is not None:
            reason = self._trouble(activation, moe.is_act_and_mul, moe.hidden_dim, moe.in_dtype)
        if reason:
            self.reasons[reason] += 1
            return None
        self.served += 1
        return activation

    def take_float8(self, model: nn.Module) -> None:
        """Let twell run the experts of ``model`` in e4m3 that it can; else note why not."""
        for module in model.modules():
            if not isinstance(module, RoutedExperts) or isinstance(module.quant_method, UnquantizedFusedMoEMethod):
                continue
            method: Any = module.quant_method
            moe, activation = method.moe, _activation(method.moe)
            asked = moe.in_dtype, moe.is_act_and_mul, self.route.invariant, self._on
            reason = _vllm_float8.why_not_experts(module, *asked) or why_not(moe, self.route, self._on, float8=True)
            if not reason and activation is not None:
                reason = self._trouble(activation, moe.is_act_and_mul, moe.hidden_dim, E4M3)
            if reason:
                self.reasons[reason] += 1
                continue
            self.float8 += 1
            ours = object.__new__(_float8_of(method.__class__))
            vars(ours).update(vars(method), activation=activation, route=self.route, compression=self.compression)
            module.quant_method = ours

    def tell(self, model: nn.Module) -> None:
        """Say in the log what the experts of ``model`` run."""
        for module in model.modules():
            unquantised = isinstance(module, RoutedExperts) and isinstance(
                module.quant_method, UnquantizedFusedMoEMethod
            )
            if unquantised and not _register():
                self.reasons["another plug-in of vLLM runs experts"] += 1
        self.complain()
        said = _vllm_kernels.described(self.route, self._on, experts=True)
        for weights, count in (("", self.served), (" of e4m3 weights", self.float8)):
            if count:
                through = "run through torch.ops.twell.experts"
                vllm.logger.info("twell: %d layers of experts%s %s: %s", count, weights, through, said)

    def complain(self) -> None:
        """Say in the log why layers that were asked about run as without twell."""
        for reason, count in self.reasons.items():
            vllm.logger.warning("twell: %d layers of experts run as without twell: %s", count, reason)


_making: ContextVar[Layers | None] = ContextVar("_making", default=None)


@contextmanager
def serving(layers: Layers) -> Iterator[None]:
    """Let twell run the experts of the model that is made within, as ``layers`` says."""
    _register()
    token = _making.set(layers)
    try:
        yield
    except Exception:
        # vLLM may have no kernel for them
        layers.complain()
        raise
    finally:
        _making.reset(token)


@functools.cache
def _register() -> bool:
    """Register ``RunsExperts`` with vLLM in this process; return whether its place was free."""
    try:
        UnquantizedFusedMoEMethod.register_oot(RunsExperts)
    except AssertionError:
        return False
    return True


def _run(
    self: Any,
    layer: Any,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared_experts: Any = None,
    shared_experts_input: Tensor | None = None,
) -> Tensor:
    """x [T, K] -> y [T, K], the sum over the experts of this rank; vLLM runs shared experts before."""
    if layer.apply_router_weight_on_input:
        # of the one expert of a token, which is all that vLLM takes
        x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
    # those of others are -1
    ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids]
    first, second = layer.w13_weight.chunk(2, 1) if self._gated else (layer.w13_weight, None)
    operands = x, first, second, layer.w2_weight.transpose(1, 2), ids, topk_weights.float()
    how = self.compression, self.route.strategy, *self.activation, self.route.invariant
    scales: tuple[Tensor | None, ...] = ()
    if first.dtype == E4M3:
        scales = None, None, layer.w13_input_scale, layer.w13_weight_scale, None, layer.w2_weight_scale
    y: Tensor = torch.ops.twell.experts(*operands, *how, *scales)
    return y


def _store(self: Any, layer: Any) -> None:
    """Store w2 [E, K, N] by rows of neurons, as the transposed view of a contiguous tensor; in e4m3 scales by rows."""
    if isinstance(self, RunsFloat8Experts):
        _vllm_float8.load_experts(layer)
    layer.w2_weight.data = layer.w2_weight.data.transpose(1, 2).contiguous().transpose(1, 2)


class RunsExperts(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Experts of one rank as one operator: their neurons with tensor parallelism, some of them with expert parallelism.

    w2 [E, K, N] lies in memory by rows of neurons, which the kernels read; its shape stays.
    """

    # what vLLM saves has the same shapes and values
    supports_pre_processed_weights = True

    def __init__(self, moe: Any) -> None:
        layers = _making.get()
        activation = None if layers is None else layers.take(moe)
        if layers is None or activation is None:
            # vLLM's own, to all who ask
            self.__class__ = UnquantizedFusedMoEMethod
            UnquantizedFusedMoEMethod.__init__(self, moe)
            return
        # vLLM's own class looks for a kernel, and raises if it has none
        super(UnquantizedFusedMoEMethod, self).__init__(moe)
        self.unquantized_backend = UnquantizedMoeBackend.OOT
        self._gated, self.activation = moe.is_act_and_mul, activation
        self.route, self.compression = layers.route, layers.compression

    process_weights_after_loading = _store

    forward_native = _run


class RunsFloat8Experts:
    """As ``RunsExperts``, of experts in e4m3 without a gate; vLLM's own class beside it makes and loads the weights."""

    supports_pre_processed_weights = False
    is_monolithic = False

    _gated = False
    apply, process_weights_after_loading = _run, _store

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """No configuration of a kernel of vLLM."""


@functools.cache
def _float8_of(stock: Any) -> Any:
    """A class of vLLM's for experts in e4m3 that run through twell, by its name, which vLLM's loaders ask for."""
    return type(stock.__name__, (RunsFloat8Experts, stock), {})


def why_not(moe: Any, route: Route, on: torch.device, float8: bool = False) -> str:
    """Why experts with this ``FusedMoEConfig`` run as without twell, whatever their weights; "" if they need not."""
    if _activation(moe) is None:
        return f"their activation must be one of {', '.join(_ACTIVATIONS)}, got {moe.activation.value}"
    if moe.is_lora_enabled:
        return "LoRA is enabled"
    if moe.has_bias:
        return "experts must have no bias"
    if moe.moe_backend != "auto":
        return f"another kernel was named, {moe.moe_backend}"
    if moe.moe_parallel_config.enable_eplb:
        return "EPLB, which moves experts between ranks, is enabled"
    if moe.dp_size > 1 or moe.pcp_size > 1 or moe.is_sequence_parallel:
        return "all tokens must be on every rank, got data, context or sequence parallelism"
    if moe.in_dtype not in PACKED_DTYPES:
        return f"weights must be bfloat16 or float16, got {moe.in_dtype}"
    for name, number, most in (
        ("experts of a rank", moe.num_local_experts, geometry.MAX_EXPERTS),
        ("experts of a token", moe.experts_per_token, geometry.MAX_EXPERTS_OF_TOKEN),
    ):
        if number > most:
            return f"{name} must be at most {most}, got {number}"
    facts = Facts("sizes of a rank", n=moe.intermediate_size_per_partition, k=moe.hidden_dim, float8=float8)
    if refusal := unpackable(facts, instead=""):
        return refusal.message
    if on.type == "cuda" and tuning.family(on.index or 0) != specs.SM90:
        return "kernels for experts need compute capability 9.0"
    return ""


def _activation(moe: Any) -> Activation | None:
    return _ACTIVATIONS.get(moe.activation.value)
