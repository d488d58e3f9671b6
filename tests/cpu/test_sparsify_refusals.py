"""What sparsify_ refuses, since it computes something else or may do so later, and what is near to that and taken.

Tables have the code of a module's ``forward`` beside the reason: see ``ffns.written``.
"""

from __future__ import annotations

import functools
import operator  # noqa: F401, of the codes
import re
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import ffns
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ffns import (
    BF16,
    Block,
    DoubleReLU,
    FATReLU,
    Gated,
    K,
    N,
    OfOwnLinears,
    Output,
    Pair,
    Plain,
    Split,
    Wi,
    tokens,
    written,
)
from torch import Tensor, nn

from twell._activation import Activation
from twell._sparsify import layers, sparsify_
from twell._sparsify.equivalence import family_of

# Modules with the names of a layer that compute something else.


class Adapter(nn.Module):
    """The names of an FFN on a bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj, self.up_proj = nn.Linear(64, 16), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up_proj(F.relu(self.down_proj(x)))


class Weaker(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 0.1


FLAG = False
GUARDED = """
hidden = self.activation(self.up_proj(x))
if hidden.dtype == torch.float16:
    hidden = hidden.clamp(max=64504)
return self.down_proj(hidden)
"""


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
    y differs for
        return F.dropout(super().forward(x), 0.1, self.training)
    y differs for
        return 1.001 * super().forward(x)
    y differs for
        return x + super().forward(x)
    its activation is on up_proj, not on gate_proj
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))
    it runs clamp
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=6000) * self.up_proj(x))
    y differs for
        return super().forward(x), None
    its forward takes residual besides x
        def forward(self, x, residual):
            return residual + super().forward(x)
    y differs for .* training mode, with gradients
        y = super().forward(x)
        return 1.5 * y if self.training and torch.is_grad_enabled() else y
    it runs mul
        y = super().forward(x)
        return 2 * y if x.shape[:-1].numel() == 1 else y
    branches on x.shape\[-2\] > 1000
        y = super().forward(x)
        if x.shape[-2] > 1000:
            y = y * 2
        return y
    branches on x.is_cuda
        y = super().forward(x)
        return y.relu() if x.is_cuda else y
    Plain: branches on hidden.dtype == torch.float16
        hidden = self.activation(self.up_proj(x))
        if hidden.dtype == torch.float16:
            hidden = hidden.clamp(max=64504)
        return self.down_proj(hidden)
    Plain: it runs clamp
        return self.down_proj(self.activation(self.up_proj(x)).clamp(max=1e300))
    y differs for
        gate = self.act_fn(self.gate_proj(x).float())
        return self.down_proj((gate * self.up_proj(x).float()).to(x.dtype))
    the gradient of x differs
        return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))
    the gradient of x differs
        return super().forward(Weaker.apply(x))
    the gradient of down_proj.weight differs
        return F.linear(self.act_fn(self.gate_proj(x)) * self.up_proj(x), self.down_proj.weight.detach())
    it runs clamp
        gate = self.gate_proj(x)
        if gate.requires_grad:
            gate.register_hook(lambda grad: grad.clamp(-1e20, 1e20))
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))
    it runs mul
        scale = 1.0
        def forward(self, x):
            return self.scale * super().forward(x)
    reads self.doubled \(False\)
        doubled = False
        def forward(self, x):
            y = super().forward(x)
            return y + y if self.doubled else y
    reads FLAG \(False\)
        y = super().forward(x)
        return y + y if FLAG else y
    reads self.options \(dict\)
        def __init__(self):
            super().__init__()
            self.options = {"double": 0}
        def forward(self, x):
            y = super().forward(x)
            for _ in range(self.options["double"]):
                y = y + y
            return y
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
    it runs _local_scalar_dense
        y = super().forward(x)
        return y if x.isfinite().all() else y.nan_to_num()
    """,
)


# Ways to double x of more than 100 tokens, more than any trial has, or to differ only after a later change.


def doubled(x: Tensor) -> Tensor:
    return x if x.shape[0] <= 100 else 2 * x


def twice(x: Tensor) -> Tensor:
    return 2 * x


def scaling(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def scaled(self: nn.Module, x: Tensor) -> Tensor:
        return forward(self, doubled(x))

    return scaled


def counting(forward: Callable[..., Tensor], calls: list[int]) -> Callable[..., Tensor]:
    return lambda self, x: (calls, forward(self, x))[1]


class Doubling:
    def __call__(self, x: Tensor) -> Tensor:
        return doubled(x)


class Switched:
    """An activation with a switch that is not a module, so its attributes are not seen."""

    relu = True

    def __call__(self, x: Tensor) -> Tensor:
        return F.relu(x) if self.relu else F.silu(x)


class Shelf:
    act = staticmethod(F.relu)
    acts = {"relu": F.relu}  # noqa: RUF012

    @staticmethod
    def twice_if_long(x: Tensor) -> Tensor:
        return x if x.shape[0] <= 100 else 2 * x


HELPER: Any = types.ModuleType("helper")
HELPER.before, HELPER.acts, HELPER.relu = doubled, {"relu": F.relu}, F.relu
DOUBLING, ACTS, SEEN = Doubling(), {"relu": F.relu}, [None]


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    if x.shape[0] > 100:
        x = x + x
    return x


def without_source(text: str) -> Callable[..., Any]:
    made: dict[str, Any] = {"F": F}
    exec(text, made)
    return made["forward"]  # type: ignore[no-any-return]


UNDECIDED = rows(
    Gated,
    r"""
    doubled branches on x.shape
        forward = scaling(Gated.forward)
    reads calls \(list\)
        forward = counting(Gated.forward, [])
    doubled branches on x.shape
        return super().forward(HELPER.before(x))
    Written.forward imports functools when it runs
        from functools import partial
        return partial(super().forward, x)()
    (reads DOUBLING \(Doubling\)|doubled branches on)
        return super().forward(DOUBLING(x))
    before branches on x.shape
        @staticmethod
        def before(x):
            return x if x.shape[0] <= 100 else 2 * x
        def forward(self, x):
            return super().forward(type(self).before(x))
    twice_if_long branches on x.shape
        return super().forward(Shelf.twice_if_long(x))
    reads scripted \(ScriptFunction\)
        return super().forward(scripted(x))
    branches on range\(x.shape\[0\] // 101\)
        for _ in range(x.shape[0] // 101):
            x = x + x
        return super().forward(x)
    branches on left
        left = x.shape[0] // 101
        while left:
            left, x = left - 1, x + x
        return super().forward(x)
    branches on range\(x.shape\[0\] // 101\)
        y = super().forward(x)
        [y.zero_() for _ in range(x.shape[0] // 101)]
        return y
    it runs s|branches on
        for other in (*x.split(100)[1:],):
            other.zero_()
        return super().forward(x)
    uses map, which is neither Python nor torch's
        y = super().forward(x)
        list(map(lambda _: y.zero_(), range(x.shape[0] // 101)))
        return y
    calls reduce, which is neither Python nor torch's
        return super().forward(functools.reduce(lambda a, _: a + a, range(x.shape[0] // 101), x))
    calls (iter|next), which is neither
        each = iter([super().forward, lambda x: Gated.forward(self, 2 * x)][x.shape[0] > 100 :])
        return next(each)(x)
    calls min, which|branches on min\(
        def double(self, x):
            return super().forward(2 * x)
        def forward(self, x):
            return (super().forward, self.double)[min(x.shape[0] // 101, 1)](x)
    uses operator.itemgetter, which is neither
        return operator.itemgetter(0)((super().forward, twice))(x)
    uses __getitem__
        return super().forward((x.view_as, twice).__getitem__(x.shape[0] // 101)(x))
    calls dict.get, which is neither
        act = {torch.float16: F.silu}.get(x.dtype, F.relu)
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))
    branches on 'relu' \+
        act = getattr(F, "relu" + "6" * (x.shape[0] // 101))
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))
    reads ACTS \(dict\)
        act = lambda value: ACTS["relu"](value)
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))
    reads ACTS \(dict\)
        (gate,) = [ACTS["relu"](value) for value in (self.gate_proj(x),)]
        return self.down_proj(gate * self.up_proj(x))
    reads HELPER.acts \(dict\)
        return self.down_proj(HELPER.acts["relu"](self.gate_proj(x)) * self.up_proj(x))
    reads Shelf.acts \(dict\)
        return self.down_proj(Shelf.acts["relu"](self.gate_proj(x)) * self.up_proj(x))
    uses __dict__
        def __init__(self):
            super().__init__()
            object.__setattr__(self, "doubled", 0)
        def forward(self, x):
            y = super().forward(x)
            return y + y if self.__dict__["doubled"] else y
    has branches, and its source cannot be read
        forward = without_source(DOUBLES)
    """,
)
DOUBLES = """
def forward(self, x):
    x = x if x.shape[0] <= 100 else 2 * x
    return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))
"""


def checked(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if args[0].dim() == 0:
            raise ValueError(", ".join(str(size) for size in args[0].shape))
        return forward(self, *args, **kwargs)

    return wrapped


DECIDED = {
    "decorated": "forward = checked(Gated.forward)",
    "of three dimensions": """
        if x.ndim != 3:
            raise ValueError(", ".join(str(size) for size in x.shape))
        return super().forward(x)
    """,
    "helped": """
        @staticmethod
        def gated(gate, up):
            return HELPER.relu(gate) * up
        def forward(self, x):
            from torch.nn.functional import linear
            parts: list[Tensor] = []
            parts = [layer(x) for layer in (self.gate_proj, self.up_proj)]
            hidden = self.gated(parts[0], parts[-1])
            for layer in (self.down_proj,):
                hidden = linear(hidden, layer.weight)
            return hidden.view(*x.shape[:-1], x.shape[x.dim() - 1])
    """,
    "generated": "forward = without_source(GENERATED)",
    "flat": """
        y = super().forward(x.view(-1, K).to(self.gate_proj.weight.dtype))
        return y.view(x.shape)
    """,
    "dropout of nothing": "return F.dropout(super().forward(x), 0.0, self.training)",
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
GENERATED = "def forward(self, x):\n    return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))\n"
ACCEPTED: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(made, code) for name, code in DECIDED.items()},
    "partial": lambda: Gated(functools.partial(Shelf.act)),
    "own class": lambda: Gated(type("OwnReLU", (nn.ReLU,), {})()),
    "lambda": lambda: Gated(lambda x: x.relu()),
}


@pytest.mark.parametrize("form", ACCEPTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_the_function_may_be_written_in_other_ways(form: str, dtype: torch.dtype) -> None:
    m, x = nn.Sequential(ACCEPTED[form]()).to(dtype), tokens(dtype)
    expected = m(x)
    assert sparsify_(m) == ["0"]
    rounding = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(m(x), expected, **rounding)


class Surrogate(torch.autograd.Function):
    """ReLU with the gradient of SiLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x)))


class Shifted(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * x.abs()


class Counting(nn.ReLU):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Annealed(nn.ReLU):
    slope = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


@pytest.mark.parametrize(
    "act",
    [
        *(Surrogate.apply, Shifted(), Counting(), Annealed(), nn.Hardtanh(0, 60000.0), nn.Threshold(0.5, 1e-30)),
        lambda x: F.relu(x).where((x < 1.5) | (x > 1.9), 0.0),
        *(nn.RReLU(0.0, 0.0), lambda x: x.clamp(min=0), lambda x: F.relu(x).clamp(max=60000.0)),
        *(lambda x: F.relu(x).detach(), lambda x: F.relu(x.bfloat16()).to(x.dtype)),
        *(lambda x: F.relu(x) if x.dim() == 1 else F.gelu(x), lambda x: F.relu(x) * (1 if x.ndim < 3 else 0.5)),
        lambda x: F.relu(x) if x.dim() == 1 else x.clamp(min=0),
    ],
)
@pytest.mark.parametrize("form", [Gated, Block])
def test_near_relus_are_refused(form: Any, act: Any) -> None:
    m = nn.Sequential(form(act))
    with pytest.raises(ValueError, match=r"0 \(\w+\) must apply ReLU, got "):
        sparsify_(m)
    assert type(m[0]) is form


BLOCKS = rows(
    Block,
    r"""
    must call self.fc2 right on the result of an activation
        # as BART has it
        h = self.activation_fn(self.fc1(x))
        h = F.dropout(h, 0.1, self.training)
        return x + self.fc2(h)
    must use h for self.fc2 alone
        h = self.activation_fn(self.fc1(x))
        return x + self.fc2(h) + h.mean()
    must use h for self.fc2 alone
        h = self.fc1(x)
        a = self.activation_fn(h)
        y = self.fc2(a)
        return x + y + h.mean()
    must call self.fc1 once
        x = self.fc2(self.activation_fn(self.fc1(x)))
        return self.fc2(self.activation_fn(self.fc1(x)))
    self.activation_fn must be an attribute of the instance
        # a method is found before a child of its name
        def __init__(self):
            super().__init__()
            del self.activation_fn
        def activation_fn(self, x):
            return F.relu(x)
        def forward(self, x):
            return x + self.fc2(self.activation_fn(self.fc1(x)))
    must call self.activation_fn right on the result of self.fc1
        return self.fc2(self.activation_fn(self.final(self.fc1(x))))
    must call self.fc1 once
        return self.fc2(self.activation_fn(self.fc1(x))) + self.fc1.forward(x).mean()
    must reach fc1, fc2 and activation_fn by these names alone, got getattr
        return getattr(self, "fc1")(x).mean() + self.fc2(self.activation_fn(self.fc1(x)))
    must reach fc1, fc2 and activation_fn by these names alone, got self.named_children
        return dict(self.named_children())["fc1"](x).mean() + self.fc2(self.activation_fn(self.fc1(x)))
    its features must use activation_fn
        forward = Block.forward
        def features(self, x):
            return self.activation_fn(self.fc1(x))
    its bottom must use fc1
        forward = Block.forward
        @property
        def bottom(self):
            return self.fc1
    a decorator of its forward must use fc1
        # it differs from its source
        forward = beside(Block.forward)
    must call fc1, activation_fn, fc2 once, in this order
        # the source of forward does not show that this calls fc1, too
        def extra(self, x):
            next(child for child in self.children() if isinstance(child, nn.Linear))(x)
            return x.mean()
        def forward(self, x):
            return self.extra(x) + self.fc2(self.activation_fn(self.fc1(x)))
    must use what self.fc1 and self.activation_fn return for self.fc2 alone
        hidden = self.fc1(x)
        hidden = self.activation_fn(hidden)
        y = self.fc2(hidden)
        return y + variables_of_the_caller()["hidden"].mean()
    must use h for self.fc2 alone
        h = self.activation_fn(self.fc1(x))
        y = h.mean() + self.fc2(h)
        return y
    must use h for self.fc2 alone
        h = self.activation_fn(self.fc1(x))
        y = self.fc2(h)
        h += 1
        return x + y
    must use h for self.fc2 alone
        h, penalty = x, 0
        for _ in range(2):
            penalty = penalty + h.mean()
            h = self.activation_fn(self.fc1(x))
            y = self.fc2(h)
        return y + penalty
    must use h for self.fc2 alone
        h, penalties = x, []
        while len(penalties) < 2 and h.isfinite().all():
            h = self.fc1(x)
            h = self.activation_fn(h)
            y = self.fc2(h)
            penalties.append(y.mean())
        return y + sum(penalties)
    must keep h to itself
        penalty = lambda: h.mean()
        h = self.activation_fn(self.fc1(x))
        y = self.fc2(h)
        return y + penalty()
    must keep h to itself
        penalty = (h.mean() for _ in range(1))
        h = self.activation_fn(self.fc1(x))
        y = self.fc2(h)
        return y + next(penalty)
    must keep h to itself
        h = None
        def kept():
            nonlocal h
            return h
        h = self.activation_fn(self.fc1(x))
        y = self.fc2(h)
        return y + kept().mean()
    must keep HIDDEN to itself
        global HIDDEN
        HIDDEN = self.activation_fn(self.fc1(x))
        y = self.fc2(HIDDEN)
        return x + y
    must read local variables by their names alone, got locals
        h = self.activation_fn(self.fc1(x))
        y = self.fc2(h)
        return y + locals()["h"].mean()
    must read local variables by their names alone, got _getframe
        h = self.activation_fn(self.fc1(x))
        y = self.fc2(h)
        return y + sys._getframe().f_locals["h"].mean()
    its gate must use fc1
        def __init__(self):
            super().__init__()
            self.gate = lambda x: self.fc1(x).mean()
        def forward(self, x):
            return self.gate(x) + self.fc2(self.activation_fn(self.fc1(x)))
    its gates must use fc1
        def __init__(self):
            super().__init__()
            self.gates = [functools.partial(lambda x: self.fc1(x).mean())]
        def forward(self, x):
            return self.gates[0](x) + self.fc2(self.activation_fn(self.fc1(x)))
    """,
)


def variables_of_the_caller() -> dict[str, Any]:
    return sys._getframe(1).f_locals


def beside(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def wrapped(self: Any, x: Tensor) -> Tensor:
        return forward(self, x) if x.shape[0] <= 100 else self.fc2(self.fc1(x))

    return wrapped


@pytest.mark.parametrize(("other", "why"), BLOCKS)
def test_another_block_is_refused(other: Callable[[], nn.Module], why: str) -> None:
    m = nn.Sequential(other())
    with pytest.raises(ValueError, match=rf"0 \(\w+\) cannot be run sparse: .*{why}.*filter_fn"):
        sparsify_(m)
    assert type(m[0].fc2) is nn.Linear


class Walking(nn.Module):
    """Calls the layers of its own nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K))


WALKS = [
    "return self.net(x) + self.net[:2](x).mean()",
    "return self.net[2](self.net[1](self.net[0](x)).relu())",
    """
    for layer in self.net:
        x = layer(x)
        self.hidden = x
    return x
    """,
    """
    for i, layer in enumerate(self.net.children()):
        x = layer(x).clamp(max=6)
    return x
    """,
    "return self.net(x) + sum(layer(x).mean() for layer in self.net[:1])",
]


@pytest.mark.parametrize("code", WALKS)
def test_code_that_calls_parts_of_a_sequence_is_refused(code: str) -> None:
    m = written(textwrap.dedent(code), Walking, globals())()
    with pytest.raises(ValueError, match=r"net \(Sequential\) must be called as a whole.*its forward calls.*filter_fn"):
        sparsify_(m)
    assert type(m.net[0]) is nn.Linear


@pytest.mark.parametrize(
    "code",
    [
        "return self.net(x) + self.net[0].weight.mean()",
        """
        for layer in self.net:
            x = layer(x)
        return x
        """,
        """
        def scale(self):
            for layer in self.net:
                layer.name = "a"
        def forward(self, x):
            return self.net(x)
        """,
    ],
)
def test_code_that_calls_a_whole_sequence_is_taken(code: str) -> None:
    m, x = written(textwrap.dedent(code), Walking, globals())(), tokens()
    expected = m(x)
    assert sparsify_(m) == ["net.2"]
    torch.testing.assert_close(m(x), expected)


# Layers of other names and activations.


class LeakyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 0.5


class Reused(Output):
    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.dense(hidden) + hidden[..., :K] + x)


class Later(Output):
    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        kept = lambda: hidden.mean()  # noqa: E731
        return self.norm(self.dense(hidden) + x) + kept()


class Again(Output):
    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.norm(self.dense(hidden) + x)
        return x


PEEKING = """
def __init__(self):
    super().__init__()
    self.peek = lambda x: self.intermediate(x).mean()
def forward(self, x):
    return self.chunk(x)
"""
AT_LEAST = "return torch.where(x >= 0.3, x, 0)"
LOOKALIKES = rows(
    Gated,
    r"""
    Wi: y differs for
        if x.dim() == 4 and self.training:
            x = x + x
        return self.wo(self.act(self.wi(x)))
    Wi: y differs for
        if x.ndim == 5:
            x = x + x
        return self.wo(self.act(self.wi(x)))
    Wi: branches on x.dim\(\) > 7
        if x.dim() > 7:
            x = x + x
        return self.wo(self.act(self.wi(x)))
    Wi: y differs for .* under autocast, evaluation mode
        h = self.wi(x)
        if x.dtype != h.dtype and not self.training:
            h = h + h
        return self.wo(self.act(h))
    Wi: enters an autocast of its own
        with torch.autocast("cuda", enabled=False):
            return self.wo(self.act(self.wi(x)))
    Wi: enters an autocast of its own
        @torch.autocast("cuda", enabled=False)
        def forward(self, x):
            return self.wo(self.act(self.wi(x)))
    Wi: has a _load_from_state_dict of its own, which would be lost
        forward = Wi.forward
        def _load_from_state_dict(self, state, prefix, *rest):
            state[prefix + "wi.weight"] = 2 * state[prefix + "wi.weight"]
            super()._load_from_state_dict(state, prefix, *rest)
    Wi: has a _apply of its own, which would be lost
        forward = Wi.forward
        def _apply(self, fn, recurse=True):
            return self
    Wi: branches on x.dtype == torch.float16
        if x.dtype == torch.float16:
            x = x.clamp(-100, 100)
        return self.wo(self.act(self.wi(x)))
    Wi: differs for .* under autocast|it runs
        if x.dtype != self.wi.weight.dtype:
            x = 2 * x
        return self.wo(self.act(self.wi(x)))
    Split: its class must use self.intermediate once
        hidden = self.intermediate(x)
        return self.output(hidden, x) + hidden.mean()
    Fused: differs for|it runs mul
        return 1.5 * super().forward(x)
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
        hidden = F.relu(self.gate_proj(x)) * self.up_proj(x)
        groups = hidden.unflatten(-1, (-1, 8))
        return self.down_proj(groups.sum(-2, keepdim=True).expand_as(groups).flatten(-2))
    y differs for x \[4, 24, K\]
        b, t, k = x.shape
        return super().forward(x.view(b, 4, -1, k).transpose(1, 2).reshape(b, t, k))
    y differs for x \[4, 24, K\]
        b, t, k = x.shape
        return super().forward(x.view(2, -1, t, k).transpose(0, 1).reshape(b, t, k))
    y differs for x \[4, 24, K\]
        b, t, k = x.shape
        return super().forward(x.view(b, -1, 4, k).sum(1, keepdim=True).expand(b, t // 4, 4, k).reshape(b, t, k))
    Fused: y differs for x \[4, 24, K\]
        b, t, _ = x.shape
        gate, up = self.gate_up_proj(x).view(b, t, -1, 2, 8).transpose(2, 3).reshape(b, t, -1).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)
    Fused: it runs cat, slice
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        first, *rest = gate.split(64, dim=-1)
        return self.down_proj(torch.cat([self.act(first), *rest], dim=-1) * up)
    it runs clamp
        hidden = F.relu(self.gate_proj(x)) * self.up_proj(x)
        if hidden.dtype != self.down_proj.weight.dtype:
            hidden = hidden.clamp(-64000, 64000)
        return self.down_proj(hidden)
    it runs mul
        hidden = F.relu(self.gate_proj(x)) * self.up_proj(x)
        if hidden.dtype != self.down_proj.weight.dtype:
            hidden = hidden * 1.001
        return self.down_proj(hidden)
    forward sets the global variable LAST
        def forward(self, x):
            global LAST
            hidden = LAST = F.relu(self.gate_proj(x)) * self.up_proj(x)
            return self.down_proj(hidden)
    forward sets the attribute last
        hidden = F.relu(self.gate_proj(x)) * self.up_proj(x)
        Shelf.last = hidden
        return self.down_proj(hidden)
    forward sets the attribute l1
        hidden = F.relu(self.gate_proj(x)) * self.up_proj(x)
        y = self.down_proj(hidden)
        y.l1 = hidden.sum()
        return y
    forward sets an item|reads SEEN
        hidden = F.relu(self.gate_proj(x)) * self.up_proj(x)
        SEEN[0] = hidden
        return self.down_proj(hidden)
    another function of x
        return self.down_proj(self.act_fn(self.gate_proj(x)) * F.silu(self.up_proj(x)))
    """,
)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        *ANOTHER,
        *UNDECIDED,
        *LOOKALIKES,
        (lambda: made(GUARDED, Plain).half(), "it runs clamp"),
        (Adapter, "must compute down_proj"),
        (lambda: Gated(Switched()), "must apply ReLU, got Switched"),
        (lambda: Gated(functools.partial(lambda x, acts: acts["relu"](x), acts=ACTS)), "must apply ReLU, got partial"),
        (lambda: Wi(made(AT_LEAST, nn.ReLU)), "must apply ReLU, got Written"),
        (lambda: Wi(made(AT_LEAST, nn.ReLU)).bfloat16(), "must apply ReLU, got Written"),
        (lambda: Wi(made("return F.relu(x).pow(3)", nn.ReLU)), "must apply ReLU, got Written"),
        # FATReLU that jumps to another value
        (
            lambda: Wi(made("return F.threshold(x, 0.5, 0.0) - 0.25 * (x > 0.5).to(x.dtype)", nn.ReLU)),
            "must apply ReLU, got Written",
        ),
        (
            lambda: Wi(made("scale = 1.0\ndef forward(self, x):\n    return super().forward(x) * self.scale", FATReLU)),
            "must apply ReLU, got Written",
        ),
        (lambda: Gated(nn.Threshold(0.5, 0.125)), "must apply ReLU, got Threshold"),
        (lambda: Split(output=Reused), "the forward of its output must use hidden for self.dense alone"),
        (lambda: Split(output=Later), "output: its forward must keep hidden to itself"),
        (lambda: Split(output=Again), "the forward of its output must call self.dense once, got a loop"),
        (lambda: made(PEEKING, Split), "its peek must use intermediate"),
        (lambda: OfOwnLinears(kind=LeakyLinear), "another function of x"),
        (lambda: nn.TransformerEncoderLayer(K, 4, N), r"must drop no values in training.*got dropout, p = 0\.1"),
        (lambda: DoubleReLU(nn.SiLU()), "another function of x"),
    ],
)
def test_another_function_is_refused(other: Callable[[], nn.Module], why: str) -> None:
    m = nn.Sequential(other())
    before = dict(m.named_modules())
    with pytest.raises(ValueError, match=rf"0 \(\w+\) .*({why}).*filter_fn"):
        sparsify_(m)
    if any(other is row.values[0] for row in ANOTHER):
        with pytest.raises(ValueError, match=why):
            sparsify_(m, activation="relu")
    assert dict(m.named_modules()) == before
    assert all(module.training for module in m.modules())


# Hooks, state and other references that would be lost.


class Held(nn.Module):
    """A model with a SiLU layer that is also held in the place that ``keep`` makes."""

    def __init__(self, keep: Callable[[Any], object]) -> None:
        super().__init__()
        self.mlp = Gated(nn.SiLU())
        kept = keep(self)
        self.mlp = self.mlp if kept is None else kept

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


@pytest.mark.parametrize(
    ("keep", "why"),
    [
        (lambda m: torch.compile(m.mlp, backend="eager"), "was compiled"),
        (lambda m: m.mlp.compile(backend="eager"), "was compiled"),
        (lambda m: setattr(m, "also", nn.ModuleList([m.mlp])), ""),
        (lambda m: setattr(m, "also", lambda x: m.mlp(x)), ""),
        (lambda m: setattr(m, "also", [m.mlp]), "has it in also, too"),
        (lambda m: setattr(m, "also", {"a": (m.mlp,)}), "has it in also, too"),
        (lambda m: setattr(m, "also", m.mlp.forward), "has it in also, too"),
        (lambda m: setattr(m, "also", functools.partial(nn.Module.__call__, m.mlp)), "has it in also, too"),
        (lambda m: setattr(m, "also", lambda x, mlp=m.mlp: mlp(x)), "has it in also, too"),
        (lambda m: setattr(m, "also", (lambda mlp: lambda x: mlp(x))(m.mlp)), "has it in also, too"),
        (lambda m: object.__setattr__(m, "also", m.mlp), "has it in also, too"),
        (
            lambda m: setattr(m, "also", nn.Parameter(m.mlp.down_proj.weight.data.view(-1)[8:])),
            "shares memory with also",
        ),
    ],
)
def test_other_references_to_the_old_layer_are_refused(keep: Callable[[Any], object], why: str) -> None:
    m = Held(keep)
    if not why:
        assert len(sparsify_(m, activation="relu")) == 1
        return
    with pytest.raises(ValueError, match=why):
        sparsify_(m, activation="relu")
    assert not layers(m)


def test_layers_of_fsdp1_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        m = FullyShardedDataParallel(nn.Sequential(Gated()), use_orig_params=True, device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match="has its parameters in one buffer: call sparsify_ before"):
            sparsify_(m)
    finally:
        dist.destroy_process_group()


class MyLinear(nn.Linear):
    """One that could do more than its forward shows."""

    def _save_to_state_dict(self, *args: Any) -> None:
        super()._save_to_state_dict(*args)


class Wrapped(nn.Module):
    """A wrapper as adapters use."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x)


def with_change(change: Callable[[Any], object], form: Callable[[], nn.Module] = Gated) -> nn.Module:
    m = form()
    change(m)
    return nn.Sequential(m)


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
        (
            put("down_proj", lambda _: nn.LazyLinear(K)),
            TypeError,
            "down_proj must be an nn.Linear itself, got .*LazyLinear",
        ),
        (put("norm", lambda _: nn.LayerNorm(K)), ValueError, r"got beside them act_fn \(ReLU\), norm \(LayerNorm\)"),
        (
            put("drop", lambda _: nn.Dropout(0.1)),
            ValueError,
            r"must drop no values in training.*got drop, p = 0\.1: set p",
        ),
        (put("scale", lambda _: nn.Parameter(torch.ones(K))), ValueError, "got beside them scale"),
        (lambda m: m.register_buffer("mask", torch.ones(N)), ValueError, "got beside them mask"),
        (put("act_fn", lambda _: nn.PReLU()), ValueError, "act_fn must be an activation without state, got PReLU"),
        (lambda m: m.register_forward_hook(print), ValueError, "has forward_hooks, which would be lost"),
        (lambda m: m.act_fn.register_forward_pre_hook(print), ValueError, "forward_pre_hooks on act_fn"),
        (lambda m: m.up_proj.register_full_backward_hook(print), ValueError, "backward_hooks on up_proj"),
        (lambda m: m.register_state_dict_pre_hook(lambda *_: None), ValueError, "has state_dict_pre_hooks"),
        (put("forward", lambda f: lambda x: f(x)), ValueError, "a forward set on the instance"),
        (put("up_proj", lambda _: nn.Linear(K, N + 8, False)), ValueError, r"up_proj.weight must be \[264, 32\]"),
        (lambda m: m.up_proj.to(BF16), ValueError, "on one dtype, got torch.bfloat16 and torch.float32"),
        (lambda m: m.up_proj.to("meta"), ValueError, "on one device, got cpu and meta"),
    ],
)
def test_layers_with_hooks_or_state_are_refused(
    change: Callable[[Any], object], error: type[Exception], why: str
) -> None:
    m = with_change(change)
    with pytest.raises(error, match=rf"^0 \(Gated\).*{why}.*filter_fn"):
        sparsify_(m)
    assert type(m[0]) is Gated


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.fc1.register_forward_hook(print), "forward_hooks on fc1"),
        (lambda m: m.activation_fn.register_forward_hook(print), "forward_hooks on activation_fn"),
        (put("forward", lambda f: lambda x: f(x)), "a forward set on the instance"),
    ],
)
def test_blocks_with_hooks_on_the_layers_are_refused(change: Callable[[Any], object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        sparsify_(with_change(change, Block))


def test_quantised_weights_are_refused() -> None:
    class Quantised(nn.Parameter):
        pass

    m = Gated()
    m.up_proj.weight = Quantised(m.up_proj.weight.data)
    with pytest.raises(
        TypeError, match=r"up_proj\.weight must be a plain nn\.Parameter, got Quantised: call sparsify_"
    ):
        sparsify_(nn.Sequential(m))


@pytest.mark.parametrize("activation", [None, "relu"])
def test_dropout_in_the_place_of_an_activation_is_never_lost(activation: Any) -> None:
    """ReLU in the code, and a Dropout that looks like the activation by its place."""
    m = nn.Sequential(made("return self.fc2(self.act(torch.relu(self.fc1(x))))", Pair))
    m[0].act = nn.Dropout(0.1)
    before = type(m[0])
    with pytest.raises(ValueError, match="must drop no values"):
        sparsify_(m, activation=activation)
    assert type(m[0]) is before


@pytest.mark.parametrize(("caller", "found"), [("torch.nn.functional", Activation("relu")), ("models.of_a_user", None)])
def test_backports_of_the_standard_library_are_no_code_of_a_model(
    monkeypatch: pytest.MonkeyPatch, caller: str, found: Activation | None
) -> None:
    """torch calls ``typing_extensions``, which looks at its caller's frame; other code that does is refused."""
    look: Any = types.FunctionType((lambda: sys._getframe()).__code__, {"__name__": "typing_extensions", "sys": sys})

    names: dict[str, Any] = {"__name__": caller, "torch": torch, "look": look}
    exec("def relu(x, inplace=False):\n    look()\n    return torch.relu(x)", names)
    monkeypatch.setattr(F, "relu", names["relu"])
    assert family_of(nn.ReLU(), torch.float32) == found
