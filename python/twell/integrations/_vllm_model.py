"""The models of ``twell.integrations.vllm``: vLLM's own, with their ReLU FFNs through ``ops.ffn`` and ``ffn_float8``.

vLLM traces a model once, with a symbolic number of tokens, and captures CUDA graphs of many sizes. So a layer is one
operator, which sees the real number of tokens and chooses its strategy then.

The linear layers of a served FFN stay vLLM's: they hold, load and shard the weights, gate and up as one [2 N, K] of a
rank's halves, and add the results of ranks. But the product of the last one is the operator, over the weights of all.
So an FFN with a gate is a call of that one. One without keeps the code around it: its first linear layer hands x on,
and its activation does nothing.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ReLUSquaredActivation
from vllm import envs
from vllm.model_executor.layers import activation as stock_activations
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.models.transformers import TransformersForCausalLM

from twell import __version__
from twell.base.activation import RELU, Activation
from twell.choose.plan import PACKED_DTYPES, Facts, Route, routed, unpackable
from twell.integrations import _vllm_experts, _vllm_float8, _vllm_kernels, layouts, vllm
from twell.integrations._vllm_auto import ServedStrategy, watch
from twell.integrations.sparsify import candidates
from twell.integrations.sparsify.known import known
from twell.integrations.sparsify.replace import put
from twell.nn import configuration
from twell.ops.ffn import direct
from twell.ops.float8 import E4M3
from twell.ops.library import is_direct
from twell.runtime import modes


class FFN(NamedTuple):
    """A feed-forward layer by the names of its parts in a module of vLLM.

    up: the first projection; "" for one of gate and up, which vLLM makes of both. act: what holds the activation.
    """

    up: str
    act: str
    down: str
    activation: Activation

    @property
    def gated(self) -> bool:
        return not self.up


# vLLM's own classes of models, by their modules, and in each those of FFNs without a gate: class, up, act, down. Their
# code is down(act(up(x))), and what comes before and after it in OPT's.
_OWN = {
    "arcee": ("ArceeMLP", "up_proj", "act_fn", "down_proj"),
    "jais2": ("Jais2MLP", "up_proj", "act_fn", "down_proj"),
    "nemotron": ("NemotronMLP", "up_proj", "act_fn", "down_proj"),
    "nemotron_h": ("NemotronHMLP", "up_proj", "act_fn", "down_proj"),
    "opt": ("OPTDecoderLayer", "fc1", "activation_fn", "fc2"),
}
_OWN_ACTIVATIONS = {
    nn.ReLU: RELU,
    stock_activations.ReLUSquaredActivation: Activation("relu2"),
    ReLUSquaredActivation: Activation("relu2"),
}


@functools.cache
def _of_own(stock: Any) -> Any:
    class Model(stock):  # type: ignore[misc]
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            tell_graphs_apart(vllm_config)
            config = vllm_config.model_config.hf_config.get_text_config()
            experts = _vllm_experts.Layers(route_of(config), _compression(config), _device(vllm_config))
            with _vllm_experts.serving(experts):
                super().__init__(vllm_config=vllm_config, prefix=prefix)
            name, up, act, down = _OWN[stock.__module__.rpartition(".")[2]]
            found: dict[str, FFN | str] = {}
            for path, module in self.named_modules():
                if type(module).__name__ == name and (activation := _own_activation(getattr(module, act))):
                    found[path] = FFN(up, act, down, activation)
            experts.take_float8(self)
            if found or not experts.served + experts.float8:
                serve(self, found, vllm_config)
            experts.tell(self)

    # it is that class, with other FFNs, to whatever vLLM or its log asks
    Model.__name__, Model.__qualname__, Model.__module__ = stock.__name__, stock.__qualname__, stock.__module__
    return Model


def _own_activation(act: object) -> Activation | None:
    return next((activation for kind, activation in _OWN_ACTIVATIONS.items() if isinstance(act, kind)), None)


class SparseForCausalLM(TransformersForCausalLM):  # type: ignore[misc]
    """A model of transformers in vLLM whose ReLU FFNs run through twell.

    Layers that cannot (LoRA, weights in other formats than 16 bits and e4m3, sizes that the kernels do not take, other
    activations) run as in ``TransformersForCausalLM``; the log has one line for each reason. With dReLU and FATReLU,
    which only twell has, they raise.

    Raises NotImplementedError for a configuration without gates, and for layers that only twell could run and cannot;
    ValueError for a configuration whose strategy, compression, figures or threshold do not exist.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        if wrong := vllm.correct(config):
            vllm.logger.info("twell: %s", wrong)
        # of an activation that no stock class has: the model is made with ReLU
        own = configuration.as_stock(config)
        if len(activations := {*own.values()}) > 1:
            raise ValueError(f"a configuration must name one activation, got {activations}")
        self._only_twell = next(iter(activations), None)
        tell_graphs_apart(vllm_config)
        try:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        finally:
            for key, activation in own.items():
                key.write(config, activation)

    def recursive_replace(self) -> None:
        """Replace the modules of transformers by vLLM's, then serve the FFNs among them."""
        found = _of_transformers(self.model)
        super().recursive_replace()
        serve(self.model, found, self.vllm_config, self._only_twell)

    @staticmethod
    def served(stock: Any) -> Any:
        """The class of vLLM's registry with its FFNs through twell; itself where twell knows none of them."""
        if stock is TransformersForCausalLM:
            return SparseForCausalLM
        return _of_own(stock) if stock.__module__ in {f"vllm.model_executor.models.{name}" for name in _OWN} else stock

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As in vLLM; down weights of the paper's architectures may also be stored [intermediate, hidden]."""
        if vllm.is_sparse(self.config):
            weights = _as_linear(weights, self.text_config)
        return super().load_weights(weights)  # type: ignore[no-any-return]


def _of_transformers(model: nn.Module) -> dict[str, FFN | str]:
    """The FFNs of a model of transformers that has no weights yet, by name; why not, for those that look like one."""
    found: dict[str, FFN | str] = {}
    # sizes are those of a rank, see ``why_not``
    context = candidates.Context(model, "dense", put, {})
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            # a server drops nothing
            module.p = 0.0
    for name, module in model.named_modules():
        likely = known(module)
        if likely is None or candidates.misfit(module, likely.names):
            continue
        try:
            candidate, activation = candidates.examine(name, module, likely, context)
        except (TypeError, ValueError) as error:
            where, remedy = candidates.label(name, module), f"; {candidates.LEAVE_OUT}"
            found[name] = str(error).replace(where, type(module).__name__).removesuffix(remedy)
            continue
        form, act = candidate.form, candidate.attribute
        if activation is None:
            continue
        if form.fused or act is None:
            what = "gate and up in one projection" if form.fused else "its activation in its code"
            found[name] = f"{type(module).__name__} has {what}"
        else:
            found[name] = FFN("" if form.gated else form.inputs[0], act, form.down, activation)
    return found


def _as_linear(weights: Iterable[tuple[str, Tensor]], config: Any) -> Iterator[tuple[str, Tensor]]:
    """Turn down weights that are stored by rows to those of nn.Linear. Raises as ``layouts.lies_by_rows``."""
    sizes = config.hidden_size, config.intermediate_size
    for name, weight in weights:
        if layouts.is_down(name) and layouts.lies_by_rows(weight.shape, *sizes, name=name):
            weight = weight.t()
        yield name, weight


def tell_graphs_apart(vllm_config: Any) -> None:
    """Let vLLM keep compiled graphs with twell's layers and those without under other names, by its configuration."""
    if isinstance(more := vllm_config.additional_config, dict):
        vllm_config.additional_config = more | {"twell": __version__}


def serve(
    model: nn.Module, found: Mapping[str, FFN | str], vllm_config: Any, only_twell: Activation | None = None
) -> None:
    """Run these FFNs of ``model`` through twell as far as they can, and say what runs and why the others do not.

    only_twell: an activation that stands for ReLU in ``model`` and that vLLM does not have. Raises NotImplementedError
    if a layer would run without it.
    """
    config = vllm_config.model_config.hf_config.get_text_config()
    route, layers = route_of(config), config.num_hidden_layers
    if only_twell is not None and len(found) != layers:
        raise _missing(only_twell, layers, f"{len(found)} layers of twell's form")
    on, compression = _device(vllm_config), _compression(config)
    trouble = functools.cache(functools.partial(_vllm_kernels.trouble, route, compression, on))
    reasons: Counter[str] = Counter()
    runs: Counter[bool] = Counter()
    for name, ffn in found.items():
        if isinstance(ffn, str):
            reason = ffn
        else:
            module, ffn = model.get_submodule(name), ffn._replace(activation=only_twell or ffn.activation)
            reason = why_not(module, ffn, vllm_config)
            if not reason:
                down = projections(module, ffn)[1]
                float8 = is_quantised(down)
                dtype = E4M3 if float8 else down.weight.dtype
                reason = trouble(ffn.activation, ffn.gated, down.weight.shape[0], dtype)
            if not reason:
                runs[float8] += 1
                replace(model, name, ffn, route, compression, _site(name, config))
                continue
        if only_twell is not None:
            raise _missing(only_twell, layers, f"{name}: {reason}")
        reasons[reason] += 1
    for reason, count in reasons.items():
        vllm.logger.warning("twell: %d feed-forward layers run as without twell: %s", count, reason)
    if not found:
        vllm.logger.warning(
            "twell: the model runs as without twell, which knows no feed-forward layer of it with ReLU or its square"
        )
    for float8, count in runs.items():
        watch()
        weights, said = " of e4m3 weights" if float8 else "", _vllm_kernels.described(route, on, float8)
        vllm.logger.info("twell: %d feed-forward layers%s run through torch.ops.twell.ffn: %s", count, weights, said)


def _device(vllm_config: Any) -> torch.device:
    on: torch.device = vllm_config.device_config.device
    return torch.device("cuda", torch.cuda.current_device()) if on.type == "cuda" and on.index is None else on


def _compression(config: Any) -> int:
    return int(getattr(config, "sparsity_compression", 8))


def _missing(activation: Activation, layers: int, got: str) -> NotImplementedError:
    return NotImplementedError(
        f"twell must run all {layers} feed-forward layers of a model with {activation.name}, which vLLM does not "
        f"have, got {got}"
    )


def _site(name: str, config: Any) -> ServedStrategy:
    """The strategy of the layer of this name, with the figures that the configuration has for it."""
    measured = layouts.measured(config.to_dict(), config.num_hidden_layers)
    number = next((int(part) for part in name.split(".") if part.isdecimal()), None)
    figures = None if measured is None or number is None else measured[number]
    return ServedStrategy(figures, "auto" if layouts.route_of(vars(config)).screen else "off")


def replace(model: nn.Module, name: str, ffn: FFN, route: Route, compression: int, site: ServedStrategy) -> None:
    """Let the FFN of this name run through twell."""
    module = model.get_submodule(name)
    first, down = projections(module, ffn)
    float8 = is_quantised(first)
    both: tuple[Any, Any] = HandsOn(site, ffn.gated, float8), RunsFFN(first, ffn, route, compression, float8)
    for layer, ours in zip((first, down), both, strict=True):
        layer.quant_method = ours
    if ffn.gated:
        model.set_submodule(name, ServedMLP(module, first, down))
    else:
        owner, _, key = ffn.act.rpartition(".")
        setattr(module.get_submodule(owner), key, nn.Identity())


class ServedMLP(nn.Module):
    """A served FFN with a gate: the linear layers of ``stock``, under their names. The last one is called alone."""

    def __init__(self, stock: nn.Module, first: nn.Module, down: nn.Module) -> None:
        super().__init__()
        for name, child in stock.named_children():
            if child in (first, down):
                self.add_module(name, child)
        self._down = next(name for name, child in self.named_children() if child is down)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> y [..., hidden]."""
        y: Tensor = getattr(self, self._down)(x)
        return y


class HandsOn(UnquantizedLinearMethod):  # type: ignore[misc]
    """The first projection of a served FFN: its weight stays as it was loaded, and if it is called it returns x.

    On a CPU vLLM would pack the weight for its own products.
    """

    def __init__(self, site: ServedStrategy, gated: bool, float8: bool = False) -> None:
        super().__init__()
        self._site, self._gated, self._float8 = site, gated, float8

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave a ``layer.weight`` in 16 bits alone, and let the operator find the layer's strategy by it."""
        if self._float8:
            _vllm_float8.load(layer)
        rows, k = layer.weight.shape
        self._site.learn(layer.weight, k, rows // 2 if self._gated else rows, self._gated, layer.output_size // rows)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x itself."""
        return x


class RunsFFN(UnquantizedLinearMethod):  # type: ignore[misc]
    """The down projection of a served FFN, whose product is all of the FFN: ``down(act(gate(x)) * up(x))`` of one rank.

    Its weight [K, N] lies in memory by rows of neurons, which the kernels read; its shape stays.
    """

    def __init__(self, first: Any, ffn: FFN, route: Route, compression: int, float8: bool) -> None:
        super().__init__()
        self._first, self._gated, self._float8 = first, ffn.gated, float8
        self.activation, self.route, self.compression = ffn.activation, route, compression

    def process_weights_after_loading(self, layer: Any) -> None:
        """Store ``layer.weight`` [K, N] as the transposed view of a contiguous [N, K] tensor."""
        if self._float8:
            _vllm_float8.load(layer)
        layer.weight.data = layer.weight.data.t().contiguous().t()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K], the input of the FFN, -> y [..., K]; without a gate the up projection is the first weight."""
        first, tokens = self._first, x.reshape(-1, x.shape[-1])
        gate, up = self._halves(first.weight)
        b_gate, b_up = self._halves(first.bias)
        screen = self.route.screen and not self._float8
        how = self.compression, self.route.strategy, gate, *self.activation, screen, self.route.invariant
        # a plain eager call need not go through the dispatcher
        alone = not modes.compiling() and not torch.is_grad_enabled() and is_direct(x)
        operator: Any = direct if alone else torch.ops.twell.ffn
        scales: tuple[Tensor | None, ...] = (None,) * 4
        if self._float8:
            scales = first.input_scale, *self._halves(first.weight_scale), layer.weight_scale
        y: Tensor = operator(tokens, gate, up, layer.weight.t(), b_gate, b_up, bias, *how, None, *scales, True)
        return y.view(x.shape)

    def _halves(self, both: Tensor | None) -> Any:
        """The parts of the gate and of the up projection; without a gate those of the first weight and None."""
        return both.chunk(2) if self._gated and both is not None else (both, None)


def route_of(config: Any) -> Route:
    """What the layers of a model run: what its configuration says, in batch-invariant mode "row" with ``invariant``."""
    route = layouts.route_of(vars(config))
    # the bits of the others depend on the number of tokens
    batch_invariant = envs.VLLM_BATCH_INVARIANT and route.strategy != "dense"
    return routed(Facts(strategy="row", invariant=True)) if batch_invariant else route


def why_not(module: nn.Module, ffn: FFN, vllm_config: Any) -> str:
    """Why a ReLU FFN, of vLLM's linear layers, runs as without twell; "" if it need not."""
    if vllm_config.lora_config is not None:
        return "LoRA is enabled"
    if ffn.activation.name == "drelu" and not ffn.gated:
        return "a layer with drelu must have a gate, got none"
    try:
        first, down = projections(module, ffn)
    except ValueError as error:
        return str(error)
    quantised = is_quantised(first) or is_quantised(down)
    if quantised and (reason := _vllm_float8.why_not(first, down, _device(vllm_config))):
        return reason
    if getattr(first, "gather_output", False) or not getattr(down, "input_is_parallel", True):
        return "each rank must keep its neurons from the first projection to the last, got those of all ranks"
    k, n = down.weight.shape
    if list(first.weight.shape) != (wanted := [2 * n if ffn.gated else n, k]):
        return f"the first weight must be {wanted} with a last one of {[k, n]}, got {list(first.weight.shape)}"
    if not quantised and down.weight.dtype not in PACKED_DTYPES:
        return f"weights must be bfloat16 or float16, got {down.weight.dtype}"
    refusal = unpackable(Facts("sizes of a rank", n=n, k=k, float8=quantised), instead="")
    return refusal.message if refusal else ""


def is_quantised(layer: Any) -> bool:
    """Whether vLLM made a linear layer for weights that are not in 16 or 32 bits."""
    return type(layer.quant_method) is not UnquantizedLinearMethod


def projections(module: nn.Module, ffn: FFN) -> tuple[Any, Any]:
    """The first and the last linear layer of an FFN. Raises ValueError if they are not vLLM's."""
    if ffn.gated:
        made = [child for child in module.children() if isinstance(child, MergedColumnParallelLinear)]
        if len(made) != 1:
            raise ValueError(f"vLLM must have made one MergedColumnParallelLinear of a layer, got {len(made)}")
        found = made[0], module.get_submodule(ffn.down)
    else:
        found = module.get_submodule(ffn.up), module.get_submodule(ffn.down)
    if other := [type(layer).__name__ for layer in found if not isinstance(layer, LinearBase)]:
        raise ValueError(f"projections must be linear layers of vLLM, got {other[0]}")
    return found
