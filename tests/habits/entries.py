"""Rows of the table: every entry point, how it is called, and which habits do not apply to it, with the reason."""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twell
from tests.cases.layouts import laid_out
from twell import recipe
from twell.nn.autoencoder import SparseAutoencoder
from twell.nn.float8 import Float8MLP
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.testing.case import BIASES, Case
from twell.testing.operands import build

Operands = dict[str, Any]
# operands with a row for each token
BY_TOKEN = ("x", "gate", "expert_ids", "weights")


@dataclasses.dataclass
class Call:
    """What is called and with which operands by name; a module has its weights itself."""

    run: Any
    given: Operands

    def __call__(self, **changed: Any) -> Any:
        return self.run(**self.given | changed)

    @property
    def is_module(self) -> bool:
        return isinstance(self.run, nn.Module)

    def leaves(self) -> list[Tensor]:
        """The parameters of a module; of a function its floating operands but x."""
        if self.is_module:
            return [p for p in self.run.parameters() if p.requires_grad]
        return [t for a, t in self.given.items() if a != "x" and isinstance(t, Tensor) and t.is_floating_point()]


@dataclasses.dataclass
class Entry:
    """An entry point.

    line: its Case. make: of operands and a strategy, what is called and its operands. absent: habits that do not apply,
    and why. strategy: the one that habits name. transformed: of the error under transforms, with an operand's name.
    """

    line: str
    make: Callable[[Operands, Any], tuple[Any, Operands]]
    absent: dict[str, str]
    strategy: Any = "union"
    transformed: str = "takes plain tensors, got {} "

    def call(self, strategy: Any = None, device: str = "cpu") -> Call:
        case = Case.of(self.line)
        given = {a: t for a, t in laid_out(case, build(case, device)).items() if a != "dy"}
        call = Call(*self.make(given, self.strategy if strategy is None else strategy))
        if call.is_module:
            call.run.to(device)
        return call


def function(call: Any, o: Operands, strategy: Any, **options: Any) -> tuple[Any, Operands]:
    return partial(call, strategy=strategy, **options), o


def packed(**given: Any) -> tuple[Tensor, Tensor]:
    """What a packed gate means: words and values behind the counts are undefined."""
    found = twell.pack(**given)
    return found.unpack(), found.stats


def thresholds(o: Operands, strategy: Any) -> tuple[Any, Operands]:
    levels = (torch.arange(len(o["b_up"]), device="cpu") % 3 + 0.5).to(o["x"])
    return function(twell.sparse_ffn, o, strategy, activation="fatrelu", threshold=levels)


def loaded(module: nn.Module, o: Operands, names: dict[str, str]) -> tuple[nn.Module, Operands]:
    """A module with the weights and biases of a problem. names: of its children those of the operands."""
    state = {f"{child}.{kind}": o[f"{letter}_{own}"] for child, own in names.items() for kind, letter in KINDS}
    module.load_state_dict(state)
    return module, {"x": o["x"]}


KINDS = (("weight", "w"), ("bias", "b"))
GATED = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
PLAIN = {"up_proj": "up", "down_proj": "down"}


def sizes(o: Operands) -> tuple[int, int]:
    return o["x"].shape[-1], o["b_up"].shape[0]


def gated(o: Operands, strategy: Any, **options: Any) -> tuple[nn.Module, Operands]:
    return loaded(SparseGatedMLP(*sizes(o), True, dtype=o["x"].dtype, strategy=strategy, **options), o, GATED)


def plain(o: Operands, strategy: Any, **options: Any) -> tuple[nn.Module, Operands]:
    return loaded(SparseMLP(*sizes(o), True, dtype=o["x"].dtype, strategy=strategy, **options), o, PLAIN)


def autoencoder(o: Operands, strategy: Any, **options: Any) -> tuple[nn.Module, Operands]:
    sae = SparseAutoencoder(*sizes(o), dtype=o["x"].dtype, strategy=strategy, **options)
    state = {"W_enc": o["w_up"].t(), "W_dec": o["w_down"].t(), "b_enc": o["b_up"], "b_dec": o["b_down"]}
    sae.load_state_dict(sae.state_dict() | {a: t for a, t in state.items() if a in sae.state_dict()})
    return sae, {"x": o["x"]}


def quantised(o: Operands, strategy: Any) -> tuple[nn.Module, Operands]:
    weights = o["w_gate"], o["w_up"], o["w_down"]
    return Float8MLP(*weights, biases=tuple(o[name] for name in BIASES), strategy=strategy), {"x": o["x"]}


def linears(o: Operands, *names: str) -> list[nn.Linear]:
    found = []
    for name in names:
        n, k = o[f"w_{name}"].shape
        found.append(nn.Linear(k, n, dtype=o["x"].dtype))
        found[-1].load_state_dict({kind: o[f"{letter}_{name}"] for kind, letter in KINDS})
    return found


class Named(nn.Module):
    """A layer as Meta's models have it."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.relu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Plain(nn.Module):
    """A layer as T5 has it."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.wi, self.wo = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(F.relu(self.wi(x)))  # type: ignore[no-any-return]


class Fused(nn.Module):
    """One projection for the gate and, behind it, the up projection."""

    def __init__(self, both: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = both, down

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.relu(gate) * up)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Two layers among other modules, which become a pair."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = up, nn.ReLU(), down

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


def made(kind: Any, names: tuple[str, ...], of: tuple[str, ...], o: Operands, strategy: Any) -> Any:
    model = nn.Sequential(kind(*linears(o, *of)))
    return twell.sparsify_(model, names=names, strategy=strategy)[0], {"x": o["x"]}


def fused(o: Operands, strategy: Any) -> tuple[nn.Module, Operands]:
    o = o | {f"{a}_up": torch.cat((o[f"{a}_gate"], o[f"{a}_up"])) for a in ("w", "b")}
    return made(Fused, ("gate_up_proj", "down_proj"), ("up", "down"), o, strategy)  # type: ignore[no-any-return]


def adapted(o: Operands, strategy: Any) -> tuple[nn.Module, Operands]:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=list(GATED), r=3, init_lora_weights=False)
    torch.manual_seed(0)
    mlp, given = gated(o, strategy)
    return peft.get_peft_model(nn.Sequential(OrderedDict(mlp=mlp)), config), {"input": given["x"]}


def compacted(o: Operands, strategy: Any) -> tuple[nn.Module, Operands]:
    mlp, given = gated(o, strategy)
    return twell.compact(mlp, torch.arange(len(o["b_up"])) % 4 > 0)[0], given


class Recipe(nn.Module):
    """Training's terms and figures of a model, and what becomes of it without its dead neurons."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        recipe.record_aux(self.model)
        tracker = recipe.SparsityTracker(self.model, every=1)
        with (
            torch.set_grad_enabled(not torch.is_inference_mode_enabled()),
            tracker.watch(0),
            twell.count_firing(self.model) as firing,
        ):
            y = self.model(x)
        term, dead = recipe.l1_term(self.model), tracker.dead()
        tracker.close()
        recipe.record_aux(self.model, False)
        small, _ = twell.compact(self.model, firing)
        again = copy.deepcopy(self.model)
        recipe.reinitialize_dead(again, {name: torch.ones_like(mask) for name, mask in dead.items()}, step=1)
        counts = [layer.counts for layer in firing.values()]
        return y, term, dead, counts, small(x), again(x)


def of_recipe(o: Operands, strategy: Any) -> tuple[nn.Module, Operands]:
    mlp, given = gated(o, strategy)
    return Recipe(nn.Sequential(mlp, SparseMLP(*sizes(o), dtype=o["x"].dtype, strategy=strategy))), given


def llama(o: Operands, strategy: Any) -> tuple[nn.Module, Operands]:
    transformers = pytest.importorskip("transformers")
    from twell.integrations.transformers import sparsify

    fields: Any = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 72, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_act": "relu", "initializer_range": 0.3}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    return Logits(sparsify(model, strategy=strategy).to(o["x"].dtype)), {"x": o["x"]}


class Logits(nn.Module):
    """A model of transformers behind given embeddings."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x[None], use_cache=False).logits[0]  # type: ignore[no-any-return]


# Tensors of the same values; F.linear takes all of these.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "padded": lambda t: F.pad(t.float(), (8, 8), value=torch.nan).to(t.dtype)[..., 8:-8],
    "odd": lambda t: F.pad(t.float(), (3, 5), value=torch.nan).to(t.dtype)[..., 3:-5],
    "every second column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
    "column-major": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "unaligned": lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape),
    "negated": lambda t: torch._neg_view(-t),
    "imaginary part": lambda t: torch.complex(t.float() * 0, -t.float()).conj().imag.to(t.dtype),
    "copied on write": lambda t: torch._lazy_clone(t),  # type: ignore[attr-defined]
    "a parameter of its own class": lambda t: type("Named", (nn.Parameter,), {})(t, requires_grad=False),
    "made in inference mode": lambda t: torch.inference_mode()(t.clone)(),
}
# Tensors of other values in less memory.
SMALLER: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda t: t[..., :1].expand(t.shape),
    "expanded rows": lambda t: t[:1].expand(t.shape),
    "zeros without memory": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
}


def no(reason: str, *habits: str) -> dict[str, str]:
    """Habits that do not apply, or a part of one, behind a colon."""
    return dict.fromkeys(habits, reason)


FUNCTION = no("a function has no state", "copies", "explain") | no("its Case has them", "mains")
MODULE = no("as the functions that it calls", "transforms")
# the formula of the whole layer, in PyTorch's operators, is what transforms are compared with
FORMULA = no("there is the formula", "dense")
INFERENCE = no("e4m3 weights are for inference in bfloat16", "backward", "mains", "overrides", "surroundings: wider")
INFERENCE |= no("no strategy takes transforms", "auto")
OF_E4M3 = "e4m3 weights are for inference alone, "
OF_EXPERTS = '"row" takes bfloat16 and float16 without gradients and transforms, got '
IN_A_MODULE = no("a module of another package calls it, and none shards it", "owned")

SIZES = "m=24 k=16 n=72 density=0.3"
LAYER, UNGATED = f"layer {SIZES} biases=gate+up+down", f"layer {SIZES} gated=False biases=up+down"
EXPERTS = f"experts {SIZES} experts=3 slots=2"

ENTRIES: dict[str, Entry] = {
    "sparse_gated_ffn": Entry(LAYER, partial(function, twell.sparse_gated_ffn), FUNCTION | FORMULA),
    "sparse_gated_ffn by row": Entry(
        LAYER, partial(function, twell.sparse_gated_ffn, activation="relu2"), FUNCTION, "row"
    ),
    "sparse_gated_ffn, figures": Entry(
        LAYER,
        partial(function, twell.sparse_gated_ffn, return_aux=True, activation="drelu"),
        FUNCTION | no("as without figures", "backward", "owned", "transforms", "overrides"),
    ),
    "sparse_ffn": Entry(UNGATED, partial(function, twell.sparse_ffn), FUNCTION | FORMULA, "row"),
    "sparse_ffn, topk": Entry(UNGATED, partial(function, twell.sparse_ffn, activation="topk", k=5), FUNCTION),
    "sparse_ffn, thresholds": Entry(UNGATED, thresholds, FUNCTION),
    "sparse_up_down": Entry(f"given {SIZES} biases=up+down", partial(function, twell.sparse_up_down), FUNCTION),
    "sparse_experts": Entry(
        EXPERTS,
        partial(function, twell.sparse_experts),
        FUNCTION
        | IN_A_MODULE
        | no("it trains by dense products: its Case", "backward")
        | no("its products are those of one operator", "overrides", "surroundings: wider"),
        "row",
        OF_EXPERTS,
    ),
    "pack": Entry(
        f"pack {SIZES} biases=gate",
        lambda o, strategy: (packed, o),
        FUNCTION | no("it packs a gate", "backward", "owned", "auto", "overrides", "surroundings: wider"),
    ),
    "sparse_gated_ffn, e4m3": Entry(
        f"{LAYER} scales=row", partial(function, twell.sparse_gated_ffn), FUNCTION | INFERENCE, "row", OF_E4M3
    ),
    "sparse_ffn, e4m3": Entry(
        f"{UNGATED} scales=row", partial(function, twell.sparse_ffn), FUNCTION | INFERENCE, "union", OF_E4M3
    ),
    "sparse_experts, e4m3": Entry(
        f"{EXPERTS} gated=False scales=row",
        partial(function, twell.sparse_experts),
        FUNCTION | INFERENCE | IN_A_MODULE,
        "row",
        OF_E4M3,
    ),
    "SparseGatedMLP": Entry(LAYER, gated, MODULE),
    "SparseMLP": Entry(UNGATED, partial(plain, activation="fatrelu", threshold=2.0), MODULE, "row"),
    "SparseAutoencoder": Entry(
        f"autoencoder {SIZES}",
        partial(autoencoder, activation="topk", k=5),
        MODULE
        | IN_A_MODULE
        | no("nothing promises it", "exported", "mains")
        | no("its weights lie by neurons", "copies: flattened", "copies: rows")
        | no("in training it counts neurons of one number of tokens", "compiled: one graph"),
    ),
    "SparseAutoencoder, jumprelu": Entry(
        f"autoencoder {SIZES}",
        partial(autoencoder, activation="jumprelu", threshold=1.5, bandwidth=1.0),
        MODULE
        | IN_A_MODULE
        | no("nothing promises it", "exported", "mains")
        | no("its weights lie by neurons", "copies: flattened", "copies: rows")
        | no("its thresholds stay in float32", "copies: recast", "backward", "surroundings: wider", "autocast"),
    ),
    "Float8MLP": Entry(
        f"{LAYER} scales=row",
        quantised,
        MODULE
        | INFERENCE
        | no("torch has none of e4m3", "copies: pickled", "copies: recast", "copies: flattened")
        | no("its weights lie by rows", "copies: rows"),
        "row",
    ),
    "sparsify_, named": Entry(LAYER, partial(made, Named, ("w1", "w3", "w2"), ("gate", "up", "down")), MODULE),
    "sparsify_, plain": Entry(UNGATED, partial(made, Plain, ("wi", "wo"), ("up", "down")), MODULE, "row"),
    "sparsify_, fused": Entry(LAYER, fused, MODULE),
    "sparsify_, pair": Entry(UNGATED, partial(made, Block, ("fc1", "fc2"), ("up", "down")), MODULE),
    "adapted": Entry(
        LAYER,
        adapted,
        MODULE
        | IN_A_MODULE
        | no("adapters are float32, and peft's", "copies: recast", "copies: flattened")
        | no("it is refused", "mains"),
    ),
    "compacted": Entry(LAYER, compacted, MODULE),
    "recipe and compaction": Entry(
        LAYER,
        of_recipe,
        MODULE
        | no("a step of training", "compiled", "exported", "copies", "repeats", "owned", "strides", "opcheck")
        | no("a step of training", "explain", "empty", "overrides", "autocast", "backward", "mains")
        | no("a step of training", "surroundings: wider", "capture"),
    ),
    "sparsified model": Entry(
        LAYER,
        llama,
        MODULE
        | no("as its layers", "strides", "surroundings", "autocast", "repeats", "empty", "backward", "owned", "mains")
        | no("as its layers", "overrides")
        | no("transformers' attention", "exported", "capture")
        | no("it has buffers that no state has", "copies: assigned"),
    ),
}
