"""The call that a case asks for, by the public functions and modules, and what surrounds it."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import twell
from twell import ops
from twell.choose.plan import route_of
from twell.choose.site import AutoStrategy
from twell.nn.autoencoder import SparseAutoencoder
from twell.nn.float8 import Float8MLP
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.testing.bits import defined_parts
from twell.testing.case import Case
from twell.testing.formula import MAIN
from twell.testing.operands import LORA_SCALE, Operands, largest, level_of, static_scale, thresholds

Outputs = dict[str, Tensor]

_PROJECTIONS = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}


def caller(case: Case, t: Operands) -> Callable[[], Outputs]:
    """What makes the call: outputs by name, gradients by that of their operand, main gradients with ``main`` before."""
    own = {"pack": _pack, "kept": _keep, "experts": _of_experts, "autoencoder": _autoencoder, "pair": _pair}
    if case.kind in own:
        return own[case.kind](case, t)
    if case.rank:
        return _adapted(case, t)
    return _float8(case, t) if case.scales else _layer(case, t)


def _asked(case: Case) -> dict[str, Any]:
    """strategy and, where a call is not of ``invariant`` kernels, that of "auto"'s own routes."""
    if case.strategy == "site":
        return {"strategy": AutoStrategy()}
    return {"strategy": route_of(case.strategy) if "+" in case.strategy else case.strategy}


def _form(case: Case, device: torch.device) -> dict[str, Any]:
    if case.top:
        return {"activation": case.activation, "k": case.top}
    return {"activation": case.activation, "threshold": thresholds(case, device) if case.by_neuron else case.threshold}


def _layer(case: Case, t: Operands) -> Callable[[], Outputs]:
    """A layer, or one behind a given gate, by the function or the module."""
    dy, given = t["dy"], {name: operand for name, operand in t.items() if name != "dy"}
    how = {**_asked(case), **_form(case, dy.device), "compression": case.compression}
    if case.module:
        return _in_module(case, _module(case, given, how), t)
    function: Any = twell.sparse_up_down if case.kind == "given" else twell.sparse_ffn
    function = twell.sparse_gated_ffn if case.kind == "layer" and case.gated else function
    rest = {} if case.gated or case.kind == "layer" else {"x": None, "w_up": None}

    def call() -> Outputs:
        leaves = {name: operand.detach().requires_grad_(name in case.wanted) for name, operand in given.items()}
        mains: dict[str, Tensor | None] = {}
        if case.mains:
            mains = {name: _main(given[name]) if name in case.wanted else None for name in case.weights}
        options = {"main_grads": tuple(mains.values())} if mains else {}

        def run(x: Tensor | None) -> Any:
            own = leaves | rest | ({} if x is None else {"x": x})
            return function(**own, **how, **options, return_aux=case.aux)

        return _results(case, _recomputed(case, run, leaves.get("x")), leaves, dy, mains)

    return call


def _recomputed(case: Case, run: Callable[[Any], Any], x: Tensor | None) -> Any:
    """The results of the call, whose forward pass runs again in backward if the case is checkpointed."""
    if not case.wants:
        with torch.no_grad():
            return run(x)
    with torch.enable_grad():
        if case.checkpointed:
            return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
        return run(x)


def _results(
    case: Case, made: Any, leaves: dict[str, Tensor], dy: Tensor, mains: dict[str, Tensor | None] | None = None
) -> Outputs:
    y, aux = made if isinstance(made, tuple) else (made, None)
    out = {"y": y.detach()}
    if aux is not None:
        out |= {"l1": aux.l1.detach(), "l0": aux.l0.detach()}
    if not case.wants:
        return out
    figures = [] if aux is None else [aux.l1, aux.l0] if case.bandwidth else [aux.l1]
    results = [(y, dy), *((figure, torch.full_like(figure, case.dl1 * case.m)) for figure in figures)]
    for name, gradient in zip(case.wanted, _gradients(case, results, leaves)):
        main = (mains or {}).get(name)
        if main is not None:
            assert gradient is None, f"{name} has a main gradient and another one"
            out[f"main {name}"] = main
        elif gradient is not None:
            out[name] = gradient
    return out


def _gradients(case: Case, results: list[tuple[Tensor, Tensor]], leaves: dict[str, Tensor]) -> Sequence[Tensor | None]:
    """Those that the case wants, of results with their upstream gradients."""
    ends = [(end, upstream.to(end.dtype).view(end.shape)) for end, upstream in results if end.requires_grad]
    with torch.autocast(results[0][0].device.type, enabled=False):
        wanted = [leaves[name] for name in case.wanted]
        return torch.autograd.grad([end for end, _ in ends], wanted, [up for _, up in ends], allow_unused=True)


def _main(weight: Tensor) -> Tensor:
    return torch.full_like(weight, MAIN, dtype=torch.float32)


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A projection of these very tensors."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach())
    return made


def _linears(case: Case, t: Operands) -> dict[str, nn.Linear]:
    """The projections by the names of weights."""
    found = {name: linear(t[name], t.get(f"b{name[1:]}")) for name in case.weights}
    for name, parameter in _parameters(found).items():
        parameter.requires_grad_(name in case.wanted)
    return found


def _module(case: Case, t: Operands, how: dict[str, Any]) -> Any:
    cls: Any = SparseGatedMLP if case.gated else SparseMLP
    return cls.from_linear(*_linears(case, t).values(), **how)


def _parameters(linears: dict[str, Any]) -> dict[str, Tensor]:
    """Weights and biases by the names of calls."""
    found = {name: linear.weight for name, linear in linears.items()}
    return found | {f"b{name[1:]}": linear.bias for name, linear in linears.items() if linear.bias is not None}


def _in_module(case: Case, module: Any, t: Operands) -> Callable[[], Outputs]:
    def call() -> Outputs:
        linears = {name: getattr(module, _PROJECTIONS[name]) for name in case.weights}
        x = t["x"].detach().requires_grad_("x" in case.wanted)
        mains: dict[str, Tensor | None] = {}
        module.accumulate_main_grad, module.record_aux = case.mains, case.aux
        for name, linear in linears.items() if case.mains else ():
            mains[name] = linear.weight.main_grad = _main(linear.weight) if name in case.wanted else None

        def run(x: Tensor | None) -> Any:
            y = module(x)
            return (y, module.aux) if case.aux else y

        made = _recomputed(case, run, x)
        module.aux = None
        return _results(case, made, {"x": x, **_parameters(linears)}, t["dy"], mains)

    return call


class _Block(nn.Module):
    """A larger block with two linear layers of which ``sparsify_`` makes one."""

    def __init__(self, linears: dict[str, nn.Linear]) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = linears["w_up"], nn.ReLU(), linears["w_down"]

    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(self.act(self.fc1(x)))


def _pair(case: Case, t: Operands) -> Callable[[], Outputs]:
    block = twell.sparsify_(_Block(_linears(case, t)), names=[("fc1", "fc2")], **_asked(case))
    assert type(block.fc2) is not nn.Linear

    def call() -> Outputs:
        x = t["x"].detach().requires_grad_("x" in case.wanted)
        # without the sum, which rounds again
        made = _recomputed(case, lambda x: block.fc2(block.act(block.fc1(x))), x)
        return _results(case, made, {"x": x, **_parameters({"w_up": block.fc1, "w_down": block.fc2})}, t["dy"])

    return call


def _adapted(case: Case, t: Operands) -> Callable[[], Outputs]:
    import peft

    how = {**_asked(case), **_form(case, t["dy"].device), "compression": case.compression}
    names = [_PROJECTIONS[name] for name in case.weights]
    config = peft.LoraConfig(target_modules=names, r=case.rank, lora_alpha=int(LORA_SCALE * case.rank))
    holder = nn.Sequential(OrderedDict(mlp=_module(case, t, how)))
    model = peft.get_peft_model(holder, config, autocast_adapter_dtype=False)
    mlp = model.get_base_model().mlp
    leaves: dict[str, Tensor] = {}
    for name in case.weights:
        layer = getattr(mlp, _PROJECTIONS[name])
        leaves |= _parameters({name: layer.base_layer})
        for part, own in (("a", layer.lora_A), ("b", layer.lora_B)):
            leaves[f"{name}_{part}"] = own["default"].weight = nn.Parameter(t[f"{name}_{part}"].detach())
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in case.wanted)

    def call() -> Outputs:
        x = t["x"].detach().requires_grad_("x" in case.wanted)
        return _results(case, _recomputed(case, model, x), {"x": x, **leaves}, t["dy"])

    return call


def _autoencoder(case: Case, t: Operands) -> Callable[[], Outputs]:
    more: dict[str, Any] = {"k": case.top} if case.top else {}
    more |= {"bandwidth": case.bandwidth} if case.bandwidth else {}
    how: dict[str, Any] = {**_asked(case), "skip": case.skip, "dtype": t["x"].dtype, **more}
    sae: Any = SparseAutoencoder(case.k, case.n, activation=case.activation, device=t["x"].device, **how)  # type: ignore[arg-type]
    names = {"w_up": "W_enc", "b_up": "b_enc", "b_down": "b_dec", "w_skip": "W_skip", "threshold": "threshold"}
    names["w_down"] = "W_dec"
    leaves: dict[str, Tensor] = {}
    for name, own in names.items():
        if name in t:
            value = t[name].detach()
            # rows of the decoder and columns of the encoder
            value = nn.Parameter(value.t() if name in ("w_up", "w_down") else value, requires_grad=name in case.wanted)
            setattr(sae, own, value)
            leaves[name] = value
    sae.train(case.train)

    def call() -> Outputs:
        x = t["x"].detach().requires_grad_("x" in case.wanted)
        with torch.no_grad():
            sae.tokens_since_fired.zero_()
            if case.activation == "batchtopk":
                sae.threshold.fill_(case.threshold)
        out = _results(case, _recomputed(case, lambda x: sae(x, case.aux), x), {"x": x, **leaves}, t["dy"])
        for name in out.keys() & {"w_up", "w_down"}:
            out[name] = out[name].t()
        if case.train:
            out["unfired"] = sae.tokens_since_fired.clone()
            if case.activation == "batchtopk":
                out["moved"] = sae.threshold.clone()
        return out

    return call


def _inferred(run: Callable[[], Tensor]) -> Callable[[], Outputs]:
    @torch.no_grad()
    def call() -> Outputs:
        return {"y": run()}

    return call


def _float8(case: Case, t: Operands) -> Callable[[], Outputs]:
    how: dict[str, Any] = {**_form(case, t["dy"].device), "compression": case.compression, "fast_accum": case.fast}
    asked = {"strategy": _asked(case)["strategy"], "invariant": False} if case.strategy == "site" else case.asked
    gate, up, down = (t.get(name) for name in _PROJECTIONS)
    biases = tuple(t.get(f"b_{name}") for name in ("gate", "up", "down"))
    if case.module or case.tokens == "static":
        scale = static_scale(case, t["dy"].device) if case.tokens == "static" else None
        module = Float8MLP(gate, up, down, biases=biases, input_scale=scale, **how, **asked)  # type: ignore[arg-type]
        return _inferred(functools.partial(module, t["x"]))
    function: Any = twell.sparse_gated_ffn if case.gated else twell.sparse_ffn
    given = {name: operand for name, operand in t.items() if name != "dy"}
    return _inferred(functools.partial(function, **given, **how, **asked))


def _of_experts(case: Case, t: Operands) -> Callable[[], Outputs]:
    given: dict[str, Any] = {name: operand for name, operand in t.items() if name != "dy"}
    how: dict[str, Any] = {**_form(case, t["dy"].device), **case.asked, "compression": case.compression}
    if case.shared:
        given["shared"] = tuple(given[name][-1] for name in case.weights)
        given |= {name: given[name][:-1] for name in case.weights}
        given |= {name: given[name][..., :-1] for name in ("expert_ids", "weights")}
    return _inferred(functools.partial(twell.sparse_experts, **given, **how))


def _pack(case: Case, t: Operands) -> Callable[[], Outputs]:
    @torch.no_grad()
    def call() -> Outputs:
        how = {"compression": case.compression, "threshold": case.threshold}
        packed = twell.pack(t["x"], t["w_gate"], t.get("b_gate"), **how)  # type: ignore[arg-type]
        return {"dense": packed.unpack(), "words": packed.words, "stats": packed.stats, "nnz": packed.nnz()}

    return call


def _keep(case: Case, t: Operands) -> Callable[[], Outputs]:
    """The hybrid format, by the operator."""
    first = case.first
    bias = t.get(f"b_{first}")
    if case.by_neuron:
        level = level_of(case, t["dy"].device)
        bias = torch.cat([torch.zeros_like(level) if bias is None else bias, level])
    up, b_up = (t["w_up"], t.get("b_up")) if first == "gate" else (None, None)
    layer = t["x"], t[f"w_{first}"], up, t["w_down"].t(), bias, b_up, t.get("b_down")
    threshold = float(case.top) if case.top else 0.0 if case.by_neuron else case.threshold

    @torch.no_grad()
    def call() -> Outputs:
        y, l1, nonzeros, kept = ops.hybrid_forward(*layer, case.compression, 0, case.activation, threshold)
        found = {"y": y, "total |h|": l1, "nonzeros": nonzeros}
        return found | defined_parts(kept, case.m, case.n, case.torch_dtype if first == "gate" else None)

    return call


@torch.enable_grad()
def dense(case: Case, t: Operands) -> Outputs:
    """A layer, a pair or one behind a given gate in plain PyTorch, by the names of outputs of a call."""
    dy, first = t["dy"], case.first
    leaves = {name: operand.detach().requires_grad_(name in case.wanted) for name, operand in t.items() if name != "dy"}
    if "gate" in t:
        # autocast casts a gate, too
        gate = leaves["gate"].to(case.torch_dtype)
    else:
        gate = F.linear(leaves["x"], leaves[f"w_{first}"], leaves.get(f"b_{first}"))
    level = level_of(case, gate.device)
    if case.top:
        gate = torch.where(largest(gate.view(-1, case.n), case.top).view(gate.shape), gate, 0)
    else:
        gate = torch.where(gate <= level, 0, gate) if case.threshold or case.by_neuron else F.relu(gate)
    hidden = gate * gate if case.activation == "relu2" else gate
    if first == "gate":
        up = F.linear(leaves["x"], leaves["w_up"], leaves.get("b_up"))
        if case.activation == "relu2":
            # the square is not rounded
            wide = gate.float()
            hidden = (wide * wide * up.float()).to(gate.dtype)
        else:
            hidden = gate * (F.relu(up) if case.activation == "drelu" else up)
    y = F.linear(hidden, leaves["w_down"], leaves.get("b_down"))
    l1, l0 = hidden.abs().sum(dtype=torch.float32), (gate > 0).sum().float()
    out = {"y": y.detach(), "l1": l1.detach() / max(case.m, 1), "l0": l0 / max(case.m, 1)}
    if not case.wants:
        return out
    found = _gradients(case, [(y, dy), *([(l1, torch.full_like(l1, case.dl1))] if case.aux else [])], leaves)
    return out | {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(case.wanted, found)}
