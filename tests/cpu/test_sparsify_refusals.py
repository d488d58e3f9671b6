"""What sparsify_ refuses, since it computes something else or may do so later, and what is near to that and taken.

A table has the code of a module's ``forward`` under its base and the reason: see ``ffns.written``.
"""

import itertools
import re
import textwrap
import threading  # noqa: F401, of the codes
from collections.abc import Callable
from typing import Any

import ffns
import pytest
import torch
import torch.nn.functional as F
from ffns import BF16, Block, Coded, Gated, K, N, Wi, Wrapped, take, tokens, written
from torch import Tensor, nn

from twell.nn.layers import SparseFFN


class HalfLinear(nn.Linear):
    """It applies half of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 0.5


class DoubledLinear(nn.Linear):
    """It computes another function of an x of another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return y if x.dtype == self.weight.dtype else 2 * y


class ToWeightsLinear(nn.Linear):
    """It casts x to the dtype of the weight, not the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)


class Reused(ffns.Output):
    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.dense(hidden) + hidden.mean() * x)


REFUSED = r"""
Gated: it draws random numbers, as a dropout does
    return F.dropout(super().forward(x), 0.1, self.training)
Gated: y differs by .* in torch.float32, training mode, with gradients
    return 1.001 * super().forward(x)
Gated: y differs by .*, of
    return x + super().forward(x)
Gated: it must compute down_proj.act.gate_proj.x.. . up_proj.x.. with an elementwise activation
    return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))
Gated: y differs by .* for x .2, 12, K. times 100000 in torch.float32
    return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=6000) * self.up_proj(x))
Gated: its forward takes residual besides x
    def forward(self, x, residual):
        return residual + super().forward(x)
Gated: y differs by .* training mode, with gradients
    y = super().forward(x)
    return 1.5 * y if self.training and torch.is_grad_enabled() else y
Gated: y differs by .* for x .1, 1, K
    y = super().forward(x)
    return 2 * y if x.shape[:-1].numel() == 1 else y
Gated: the gradient of x differs
    return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))
Gated: the gradient of down_proj.weight is missing, and .32, 264. in torch.float32 when run sparse
    return F.linear(self.act_fn(self.gate_proj(x)) * self.up_proj(x), self.down_proj.weight.detach())
Gated: the type of its output is 'tuple', and 'Tensor' when run sparse
    return super().forward(x), None
Gated: self.hidden is .2, 12, 264. in torch.float32, and missing when run sparse
    self.hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(self.hidden)
Gated: cannot run on x alone .RuntimeError
    y = super().forward(x)
    x.add_(y)
    return y
Gated: y is .* in torch.float32, and .* in torch.bfloat16 when run sparse, for .* under autocast
    with torch.autocast("cpu", enabled=False):
        return super().forward(x)
Gated: y differs by
    hidden = F.relu(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(hidden.unflatten(-1, (8, -1)).transpose(-1, -2).flatten(-2))
Gated: y differs by
    b, t, k = x.shape
    return super().forward(x.view(b, 4, -1, k).transpose(1, 2).reshape(b, t, k))
Gated: y differs by
    return self.down_proj(self.act_fn(self.gate_proj(x)) * F.silu(self.up_proj(x)))
Coded: the gradient of gate_proj.weight differs
    return self.down_proj(self.gate_proj(x).clamp(min=0) * self.up_proj(x))
DoubleReLU: y differs by
    return self.down_proj(F.silu(self.gate_proj(x)) * F.silu(self.up_proj(x)))
Gated: has a _load_from_state_dict of its own, which would be lost
    forward = ffns.Gated.forward
    def _load_from_state_dict(self, *rest):
        super()._load_from_state_dict(*rest)
Fused: y differs by
    gate, _ = self.gate_up_proj(x).chunk(2, dim=-1)
    return self.down_proj(gate * self.act(gate))
Fused: y differs by
    both = self.gate_up_proj(x)
    return self.down_proj(self.act(both[..., ::2]) * both[..., 1::2])
OfOwnLinears: y differs by
    def __init__(self):
        super().__init__(kind=HalfLinear)
    forward = ffns.OfOwnLinears.forward
OfOwnLinears: y differs by .* (under autocast|and weights in torch.float32)
    def __init__(self):
        super().__init__(kind=DoubledLinear)
    forward = ffns.OfOwnLinears.forward
OfOwnLinears: y is .* torch.float32, and .* torch.bfloat16 when run sparse
    def __init__(self):
        super().__init__(kind=ToWeightsLinear)
    forward = ffns.OfOwnLinears.forward
Split: alone: run sparse, it raises
    def __init__(self):
        super().__init__(output=Reused)
    forward = ffns.Split.forward
Block: alone: run sparse, it raises
    # as BART has it
    h = self.activation_fn(self.fc1(x))
    h = F.dropout(h, 0.1, self.training)
    return x + self.fc2(h)
Block: alone: run sparse, it raises
    h = self.activation_fn(self.fc1(x))
    return x + self.fc2(h) + h.mean()
Block: alone: run sparse, it raises
    return x + self.fc2(self.activation_fn(self.fc1(x) + 1))
Block: its activation must be an attribute, such as an nn.ReLU
    # a method is found before a child of its name
    def __init__(self):
        super().__init__()
        del self.activation_fn
    def activation_fn(self, x):
        return F.relu(x)
    def forward(self, x):
        return x + self.fc2(self.activation_fn(self.fc1(x)))
Block: alone: self.hidden, place 1 is
    h = self.fc1(x)
    self.hidden = [x, h]
    return x + self.fc2(self.activation_fn(h))
Block: cannot run on x alone .TypeError
    def forward(self, x, mask):
        return mask * self.fc2(self.activation_fn(self.fc1(x)))
Block: no copy of it can be made .TypeError.*into a module of its own
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
    forward = ffns.Block.forward
"""
ROWS = [
    pytest.param(getattr(ffns, base), code, why, id=f"{base}: {textwrap.dedent(code).strip()}")
    for base, why, code in re.findall(r"^(\w+): (.*)\n((?: +.*\n)+)", REFUSED, re.M)
]


@pytest.mark.parametrize(("base", "code", "why"), ROWS)
def test_another_function_is_refused(base: Any, code: str, why: str) -> None:
    m = nn.Sequential(written(code, base, globals())())
    before = dict(m.named_modules())
    with pytest.raises(ValueError, match=rf"0 \(\w+\) cannot be .*{why}.*filter_fn"):
        take(m)
    if base is Gated:
        with pytest.raises(ValueError, match=why):
            take(m, activation="relu")
    assert dict(m.named_modules()) == before
    assert all(module.training for module in m.modules())


DECIDED = {
    "by hand": """
        gate = torch.relu(x @ self.gate_proj.weight.t())
        return torch.einsum("...n,kn->...k", self.up_proj(x) * gate, self.down_proj.weight)
    """,
    "masked": """
        gate = self.gate_proj(x)
        return self.down_proj(torch.where(gate > 0, gate, 0) * self.up_proj(x))
    """,
    "with options": """
        def __init__(self):
            super().__init__()
            self.hidden_size, self.dropout, self.norm, self.act = K, 0.0, None, "relu"
        def gate(self, x):
            return getattr(F, self.act)(self.gate_proj(x))
        def forward(self, x):
            if x.shape[-1] != self.hidden_size:
                raise ValueError(x.shape)
            with torch.profiler.record_function("mlp"):
                hidden = self.gate(x).contiguous() * self.up_proj(x)
                if self.norm is not None:
                    hidden = self.norm(hidden)
            y = self.down_proj(F.dropout(hidden, self.dropout, self.training))
            return y.unsqueeze(0).squeeze(0) if x.dim() == 1 else y
    """,
}
ACCEPTED: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda code=code: written(code, Coded, globals())() for name, code in DECIDED.items()},
    "own class": lambda: Gated(type("OwnReLU", (nn.ReLU,), {})()),
    "lambda": lambda: Gated(lambda x: x.relu()),
    "torch.relu": lambda: Gated(torch.relu),
    **{f"{act}": lambda act=act: Gated(act) for act in (nn.ReLU(inplace=True), nn.Threshold(0, 0))},
    **{f"block {act}": lambda act=act: Block(act) for act in (nn.ReLU(inplace=True), nn.Threshold(0, 0))},
}


@pytest.mark.parametrize(("form", "dtype"), zip(ACCEPTED, itertools.cycle((torch.float32, torch.float16, BF16))))
def test_the_function_may_be_written_in_other_ways(form: str, dtype: torch.dtype) -> None:
    m, x = nn.Sequential(ACCEPTED[form]()).to(dtype).eval(), tokens(dtype)
    expected = m(x)
    assert any(isinstance(each, SparseFFN) for each in take(m).modules())
    rounding = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(m(x), expected, **rounding)


class Surrogate(torch.autograd.Function):
    """ReLU with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@pytest.mark.parametrize(
    "act",
    [
        *(Surrogate.apply, nn.ReLU6(), nn.Hardtanh(0, 60000.0), nn.Threshold(-0.1, 0.0), nn.Threshold(0.5, 0.125)),
        *(lambda x: F.relu(x).where((x < 1.5) | (x > 1.9), 0.0), lambda x: x.clamp(min=0)),
        *(lambda x: F.relu(x).detach(), lambda x: F.relu(x.bfloat16()).to(x.dtype)),
        *(lambda x: F.relu(x) if x.dim() == 1 else F.gelu(x), lambda x: F.relu(x).pow(3)),
        nn.Sequential(nn.ReLU(), nn.Dropout(0.5)),
    ],
)
@pytest.mark.parametrize("form", [Gated, Block])
def test_near_relus_are_refused(form: Any, act: Any) -> None:
    m = nn.Sequential(form(act))
    with pytest.raises(ValueError, match=r"0 \(\w+\) must apply ReLU, got "):
        take(m)
    assert type(m[0]) is form


TAKEN = {
    "a tuple": "return x + self.fc2(self.activation_fn(self.fc1(x))), None",
    "random": "return F.dropout(x + self.fc2(self.activation_fn(self.fc1(x))), 0.5, self.training)",
    "shared": """
        def __init__(self):
            super().__init__()
            self.norm = self.final
        def forward(self, x):
            return self.final(self.norm(x) + self.fc2(self.activation_fn(self.fc1(x))))
    """,
    "twice": """
        for _ in range(2):
            x = self.fc2(self.activation_fn(self.fc1(self.norm(x))))
        return x
    """,
}


@pytest.mark.parametrize("code", TAKEN)
def test_other_blocks_are_taken(code: str) -> None:
    block, x = written(TAKEN[code], Block, globals())(), tokens()
    results = []
    for _ in range(2):
        for training in (True, False):
            torch.manual_seed(0)
            y = block.train(training)(x)
            y = y[0] if isinstance(y, tuple) else y
            grads = torch.autograd.grad(y.square().sum(), [*block.parameters()], allow_unused=True)
            results.append([y, *(g for g in grads if g is not None)])
        if len(results) == 2:
            assert isinstance(take(nn.Sequential(block), strategy="union")[0].fc2, SparseFFN)
    torch.testing.assert_close(results[2:], results[:2])


# Hooks and state that would be lost.


class MyLinear(nn.Linear):
    """One that could do more than its forward shows."""

    def _save_to_state_dict(self, *args: Any) -> None:
        super()._save_to_state_dict(*args)


class Quantised(nn.Parameter):
    """A weight of another package."""


def put(name: str, make: Callable[[Any], object]) -> Callable[[Any], None]:
    return lambda m: setattr(m, name, make(getattr(m, name, None)))


@pytest.mark.parametrize(
    ("form", "change", "why"),
    [
        (Gated, put("up_proj", Wrapped), "up_proj must be an nn.Linear itself, got .*Wrapped.*adapters"),
        (Gated, put("gate_proj", lambda _: MyLinear(K, N, False)), "gate_proj must be .* got .*MyLinear"),
        (Gated, lambda m: nn.utils.parametrizations.weight_norm(m.up_proj), "up_proj must be .* got .*Parametrized"),
        (
            Gated,
            lambda m: m.up_proj.register_parameter("scale", nn.Parameter(torch.ones(1))),
            r"up_proj must have a weight \[264, 32\] and a bias alone, .* got .*; scale, a Parameter \[1\]",
        ),
        (Gated, put("norm", lambda _: nn.LayerNorm(K)), r"got beside them norm \(LayerNorm\)"),
        (Wi, put("dropout", lambda _: nn.Sequential(nn.Dropout(0.1))), "it draws random numbers, as a dropout does"),
        (Gated, lambda m: m.register_buffer("mask", torch.ones(N)), "got beside them mask"),
        (Gated, put("act_fn", lambda _: nn.PReLU()), r"got beside them act_fn \(PReLU\)"),
        (Gated, lambda m: m.register_forward_hook(print), "has forward_hooks, which would be lost"),
        (Gated, lambda m: m.act_fn.register_forward_pre_hook(print), "forward_pre_hooks on act_fn"),
        (Gated, lambda m: m.up_proj.register_full_backward_hook(print), "backward_hooks on up_proj"),
        (Gated, lambda m: m.register_state_dict_pre_hook(lambda *_: None), "has state_dict_pre_hooks"),
        (Gated, put("forward", lambda f: lambda x: f(x)), "a forward set on the instance"),
        (Gated, lambda m: m.up_proj.to(BF16), "on one dtype, got torch.bfloat16 and torch.float32"),
        (Gated, lambda m: m.up_proj.to("meta"), "on one device, got cpu and meta"),
        (
            Gated,
            lambda m: setattr(m.up_proj, "weight", Quantised(m.up_proj.weight.data)),
            r"up_proj must have a weight .*, got weight, a Quantised \[264, 32\]; bias, .*: call sparsify_ before",
        ),
        (Block, lambda m: setattr(m.fc1.bias, "data", m.fc1.bias.bfloat16()), r"fc1\.bias must be torch\.float32"),
        *(
            (
                form,
                lambda m, name=name: setattr(m.get_submodule(name).weight, "data", torch.empty(0)),
                r"\[0\].* ZeRO-3",
            )
            for form, name in ((Gated, "gate_proj"), (Block, "fc1"))
        ),
        (Block, lambda m: m.fc1.register_forward_hook(print), "forward_hooks on fc1"),
        (Block, lambda m: m.activation_fn.register_forward_hook(print), "forward_hooks on activation_fn"),
        (Block, put("forward", lambda f: lambda x: f(x)), "a forward set on the instance"),
    ],
)
def test_layers_with_hooks_or_state_are_refused(form: Any, change: Callable[[Any], object], why: str) -> None:
    m = nn.Sequential(form())
    change(m[0])
    with pytest.raises((TypeError, ValueError), match=rf"^0 \({form.__name__}\).*{why}.*filter_fn"):
        take(m)
    assert type(m[0]) is form


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.register_forward_hook(lambda _, __, y: 3 * y), "forward_hooks on intermediate"),
        (lambda m: m.register_full_backward_hook(lambda _, dx, __: dx), "backward_hooks on intermediate"),
        (lambda m: setattr(m, "forward", m.forward), "intermediate has a forward set on the instance"),
    ],
)
def test_changed_parts_of_a_known_block_are_refused(change: Callable[[Any], object], why: str) -> None:
    """What they return is computed when something uses it: code that asks for a Tensor first would see none."""
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**size, vocab_size=64, hidden_act="relu"))
    change(model.encoder.layer[0].intermediate)
    with pytest.raises(ValueError, match=why):
        take(model)
