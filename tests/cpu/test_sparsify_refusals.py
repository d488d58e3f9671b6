"""What sparsify_ refuses, since it computes something else or may do so later, and what is near to that and taken.

Tables have the code of a module's ``forward`` beside the reason: see ``ffns.written``.
"""

import functools
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
from ffns import (
    BF16,
    Block,
    DoubleReLU,
    Gated,
    K,
    N,
    OfOwnLinears,
    Output,
    Split,
    Wi,
    Wrapped,
    take,
    tokens,
    written,
)
from torch import Tensor, nn

from twell.nn import SparseFFN

# Modules with the names of a layer that compute something else.


class Adapter(nn.Module):
    """The names of an FFN on a bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj, self.up_proj = nn.Linear(64, 16), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up_proj(F.relu(self.down_proj(x)))


def made(code: str, base: type[nn.Module] = Gated) -> Any:
    return written(code, base, globals())()


def rows(base: type[nn.Module], text: str) -> list[Any]:
    """Modules and why they are refused: a line with the reason, perhaps behind the name of a base, and the code."""
    found = []
    for why, code in re.findall(r"^(\S.*)\n((?: +.*\n)+)", textwrap.dedent(text), re.M):
        name, _, rest = why.rpartition(": ")
        of = getattr(ffns, name) if name else base
        found.append(pytest.param(functools.partial(made, code, of), rest, id=f"{of.__name__}: {code.strip()}"))
    return found


ANOTHER = rows(
    Gated,
    r"""
    it drops values in training; set the dropout of its configuration to 0
        return F.dropout(super().forward(x), 0.1, self.training)
    y differs for
        return 1.001 * super().forward(x)
    y differs for
        return x + super().forward(x)
    its activation is on up_proj, not on gate_proj.*rename the children
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))
    it runs clamp
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=6000) * self.up_proj(x))
    its forward takes residual besides x
        def forward(self, x, residual):
            return residual + super().forward(x)
    y differs for .* training mode, with gradients
        y = super().forward(x)
        return 1.5 * y if self.training and torch.is_grad_enabled() else y
    y differs for x .1, 1, K
        y = super().forward(x)
        return 2 * y if x.shape[:-1].numel() == 1 else y
    the gradient of x differs
        return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))
    the gradient of down_proj.weight differs
        return F.linear(self.act_fn(self.gate_proj(x)) * self.up_proj(x), self.down_proj.weight.detach())
    its forward sets self.hidden
        self.hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(self.hidden)
    its forward raised RuntimeError
        y = super().forward(x)
        x.add_(y)
        return y
    y differs for .* under autocast
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)
    """,
)


DECIDED = {
    "by hand": """
        gate = torch.relu(x @ self.gate_proj.weight.t())
        return torch.einsum("...n,kn->...k", self.up_proj(x) * gate, self.down_proj.weight)
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
    **{name: functools.partial(made, code) for name, code in DECIDED.items()},
    "own class": lambda: Gated(type("OwnReLU", (nn.ReLU,), {})()),
    "lambda": lambda: Gated(lambda x: x.relu()),
}


@pytest.mark.parametrize(("form", "dtype"), zip(ACCEPTED, itertools.cycle((torch.float32, torch.float16, BF16))))
def test_the_function_may_be_written_in_other_ways(form: str, dtype: torch.dtype) -> None:
    m, x = nn.Sequential(ACCEPTED[form]()).to(dtype), tokens(dtype)
    expected = m(x)
    assert isinstance(take(m)[0], SparseFFN)
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
        *(Surrogate.apply, nn.Hardtanh(0, 60000.0), nn.Threshold(0.5, 1e-30)),
        *(lambda x: F.relu(x).where((x < 1.5) | (x > 1.9), 0.0), lambda x: x.clamp(min=0)),
        *(lambda x: F.relu(x).detach(), lambda x: F.relu(x.bfloat16()).to(x.dtype)),
        lambda x: F.relu(x) if x.dim() == 1 else F.gelu(x),
    ],
)
@pytest.mark.parametrize("form", [Gated, Block])
def test_near_relus_are_refused(form: Any, act: Any) -> None:
    m = nn.Sequential(form(act))
    with pytest.raises(ValueError, match=r"0 \(\w+\) must apply ReLU, got "):
        take(m)
    assert type(m[0]) is form


BLOCKS = rows(
    Block,
    r"""
    to the other
        # as BART has it
        h = self.activation_fn(self.fc1(x))
        h = F.dropout(h, 0.1, self.training)
        return x + self.fc2(h)
    to the other
        # dropped in evaluation, too
        def __init__(self):
            super().__init__()
            self.p = 0.5
        def forward(self, x):
            return x + self.fc2(F.dropout(self.activation_fn(self.fc1(x)), self.p))
    to the other
        # dropped by a module within one
        def __init__(self):
            super().__init__()
            self.drop = nn.Sequential(nn.Dropout(0.5))
        def forward(self, x):
            return x + self.fc2(self.drop(self.activation_fn(self.fc1(x))))
    for the other
        h = self.activation_fn(self.fc1(x))
        return x + self.fc2(h) + h.mean()
    to the other alone
        return x + self.fc2(self.activation_fn(self.fc1(x) + 1))
    its activation must be an attribute, such as an nn.ReLU
        # a method is found before a child of its name
        def __init__(self):
            super().__init__()
            del self.activation_fn
        def activation_fn(self, x):
            return F.relu(x)
        def forward(self, x):
            return x + self.fc2(self.activation_fn(self.fc1(x)))
    self.hidden, place 1 differs
        h = self.fc1(x)
        self.hidden = [x, h]
        return x + self.fc2(self.activation_fn(h))
    it still refers to 0.fc1
        def __init__(self):
            super().__init__()
            self.gates = [functools.partial(lambda x, layer=self.fc1: layer(x).mean())]
        def forward(self, x):
            return self.gates[0](x) + self.fc2(self.activation_fn(self.fc1(x)))
    cannot run on x alone .TypeError
        def forward(self, x, mask):
            return mask * self.fc2(self.activation_fn(self.fc1(x)))
    no copy of it can be made .TypeError
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()
        def forward(self, x):
            return x + self.fc2(self.activation_fn(self.fc1(x)))
    """,
)


@pytest.mark.parametrize(("other", "why"), BLOCKS)
def test_another_block_is_refused(other: Callable[[], nn.Module], why: str) -> None:
    m = nn.Sequential(other())
    with pytest.raises(ValueError, match=rf"0 \(\w+\) cannot be .*{why}.*a module of its own, .*filter_fn"):
        take(m)
    assert type(m[0].fc2) is nn.Linear


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
    block, x = made(TAKEN[code], Block), tokens()
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
    with torch.inference_mode():
        torch.testing.assert_close(block(x), block(x.clone()))


# Layers of other names and activations.


class Reused(Output):
    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.dense(hidden) + hidden.mean() * x)


class LeakyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 0.5


LOOKALIKES = rows(
    Gated,
    r"""
    Wi: has a _load_from_state_dict of its own, which would be lost
        forward = Wi.forward
        def _load_from_state_dict(self, state, prefix, *rest):
            state[prefix + "wi.weight"] = 2 * state[prefix + "wi.weight"]
            super()._load_from_state_dict(state, prefix, *rest)
    Fused: differs for
        gate, _ = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(gate * self.act(gate))
    Fused: it runs slice
        return super().forward(x[:100])
    Fused: differs for|it runs
        both = self.gate_up_proj(x)
        return self.down_proj(self.act(both[..., ::2]) * both[..., 1::2])
    CodedThreshold: another function of x
        return self.scale * super().forward(x)
    y differs for x \[4, 24, K\]
        hidden = F.relu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden.unflatten(-1, (8, -1)).transpose(-1, -2).flatten(-2))
    y differs for x \[4, 24, K\]
        b, t, k = x.shape
        return super().forward(x.view(b, 4, -1, k).transpose(1, 2).reshape(b, t, k))
    it runs mul
        hidden = F.relu(self.gate_proj(x)) * self.up_proj(x)
        if hidden.dtype != self.down_proj.weight.dtype:
            hidden = hidden * 1.001
        return self.down_proj(hidden)
    another function of x
        return self.down_proj(self.act_fn(self.gate_proj(x)) * F.silu(self.up_proj(x)))
    """,
)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        *ANOTHER,
        *LOOKALIKES,
        (Adapter, "must compute down_proj"),
        (lambda: Wi(made("return torch.where(x >= 0.3, x, 0)", nn.ReLU)).bfloat16(), "must apply ReLU, got Written"),
        # FATReLU that jumps to another value
        (lambda: Gated(nn.Threshold(0.5, 0.125)), "must apply ReLU, got Threshold"),
        (lambda: Gated(nn.Sequential(nn.ReLU(), nn.Dropout(0.5))), "must apply ReLU, got Sequential|another function"),
        (lambda: Split(output=Reused), "its first projection returns for the other"),
        (lambda: OfOwnLinears(kind=LeakyLinear), "another function of x"),
        (lambda: DoubleReLU(nn.SiLU()), "another function of x"),
    ],
)
def test_another_function_is_refused(other: Callable[[], nn.Module], why: str) -> None:
    m = nn.Sequential(other())
    before = dict(m.named_modules())
    with pytest.raises(ValueError, match=rf"0 \(\w+\) .*({why}).*filter_fn"):
        take(m)
    if any(other is row.values[0] for row in ANOTHER):
        with pytest.raises(ValueError, match=why):
            take(m, activation="relu")
    assert dict(m.named_modules()) == before
    assert all(module.training for module in m.modules())


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
    ("change", "error", "why"),
    [
        (put("up_proj", Wrapped), TypeError, "up_proj must be an nn.Linear itself, got .*Wrapped.*adapters"),
        (put("gate_proj", lambda _: MyLinear(K, N, False)), TypeError, "gate_proj must be .* got .*MyLinear"),
        (
            lambda m: nn.utils.parametrizations.weight_norm(m.up_proj),
            TypeError,
            "up_proj must be an nn.Linear itself, got .*Parametrized",
        ),
        (
            lambda m: m.up_proj.register_parameter("scale", nn.Parameter(torch.ones(1))),
            TypeError,
            "up_proj must have a weight and a bias alone, got bias, scale, weight",
        ),
        (put("norm", lambda _: nn.LayerNorm(K)), ValueError, r"got beside them act_fn \(ReLU\), norm \(LayerNorm\)"),
        (
            put("drop", lambda _: nn.Dropout(0.1)),
            ValueError,
            r"it may drop values of its hidden state alone, got drop, p = 0\.1: set p",
        ),
        (put("scale", lambda _: nn.Parameter(torch.ones(K))), ValueError, "got beside them scale"),
        (lambda m: m.register_buffer("mask", torch.ones(N)), ValueError, "got beside them mask"),
        (put("act_fn", lambda _: nn.PReLU()), ValueError, r"got beside them act_fn \(PReLU\)"),
        (lambda m: m.register_forward_hook(print), ValueError, "has forward_hooks, which would be lost"),
        (lambda m: m.act_fn.register_forward_pre_hook(print), ValueError, "forward_pre_hooks on act_fn"),
        (lambda m: m.up_proj.register_full_backward_hook(print), ValueError, "backward_hooks on up_proj"),
        (lambda m: m.register_state_dict_pre_hook(lambda *_: None), ValueError, "has state_dict_pre_hooks"),
        (put("forward", lambda f: lambda x: f(x)), ValueError, "a forward set on the instance"),
        (lambda m: m.up_proj.to(BF16), ValueError, "on one dtype, got torch.bfloat16 and torch.float32"),
        (lambda m: m.up_proj.to("meta"), ValueError, "on one device, got cpu and meta"),
        (
            lambda m: setattr(m.up_proj, "weight", Quantised(m.up_proj.weight.data)),
            TypeError,
            r"up_proj\.weight must be a plain nn\.Parameter, got Quantised: call sparsify_",
        ),
        (lambda m: m.fc1.register_forward_hook(print), ValueError, "Block: forward_hooks on fc1"),
        (lambda m: m.activation_fn.register_forward_hook(print), ValueError, "Block: forward_hooks on activation_fn"),
        (put("forward", lambda f: lambda x: f(x)), ValueError, "Block: a forward set on the instance"),
    ],
)
def test_layers_with_hooks_or_state_are_refused(
    change: Callable[[Any], object], error: type[Exception], why: str
) -> None:
    # "Block: " begins those of blocks
    of_block, said = why.startswith("Block: "), why.removeprefix("Block: ")
    form = Block if of_block else Gated
    m = nn.Sequential(form())
    change(m[0])
    with pytest.raises(error, match=rf"^0 \({form.__name__}\).*{said}.*filter_fn"):
        take(m)
    assert type(m[0]) is form
