"""Feed-forward networks as models write them, for the tests of ``sparsify_`` and of what happens to its layers.

Their classes are not known by name: ``NAMES`` tells their projections.
"""

import pickle
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell.integrations.sparsify import sparsify_

BF16 = torch.bfloat16
K, N = 32, 264
NAMES = [
    *(("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj"), ("fc1", "fc2"), ("w1", "w3", "w2"), ("a", "b")),
    *(("gate_up_proj", "down_proj"), ("wi", "wo"), ("dense_h_to_4h", "dense_4h_to_h"), ("0", "2")),
    ("intermediate.dense", "output.dense"),
]


def take(m: Any, *args: Any, **options: Any) -> Any:
    return sparsify_(m, *args, names=NAMES, **options)


class Gated(nn.Module):
    def __init__(self, act: Any = None, k: int = K, n: int = N, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(k, n, bias),
            nn.Linear(k, n, bias),
            nn.Linear(n, k, bias),
        )
        self.act_fn = act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Plain(nn.Module):
    def __init__(self, act: Any = None, bias: bool = True) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(K, N, bias), nn.Linear(N, K, bias)
        self.activation = act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


class Pair(nn.Module):
    """fc2(act(fc1(x))) in one expression, with an activation that is an attribute."""

    def __init__(self, act: Any = None, n: int = N, k: int = K) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(k, n), act or nn.ReLU(), nn.Linear(n, k)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Literal(nn.Module):
    """The same with the activation in the code."""

    def __init__(self, n: int = N) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(K, n), nn.Linear(n, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class Block(nn.Module):
    """A block as OPT has it: the layers among its own children, dropout after them, a residual around."""

    def __init__(self, act: Any = None, bias: bool = True) -> None:
        super().__init__()
        self.norm, self.final = nn.LayerNorm(K), nn.LayerNorm(K)
        self.activation_fn = act or nn.ReLU()
        self.fc1, self.fc2 = nn.Linear(K, N, bias), nn.Linear(N, K, bias)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.norm(x)
        # comments are no statements
        x = self.fc1(x)
        x = self.activation_fn(x)

        x = self.fc2(x)
        x = F.dropout(x, 0.5, self.training)
        return self.final(residual + x)


class FATReLU(nn.Module):
    def __init__(self, threshold: float = 0.25) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > self.threshold, x, 0.0)


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.square(F.relu(x))


class Meta(nn.Module):
    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(K, N, False), nn.Linear(K, N, False), nn.Linear(N, K, False)
        self.act_fn = act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act_fn(self.w1(x)) * self.w3(x))


class DoubleReLU(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))


class Coded(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self.act_fn
        self.scale, self.threshold = 1.0, 0.25


class CodedThreshold(Coded):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.threshold(self.gate_proj(x), self.threshold, 0.0) * self.up_proj(x))


class Fused(nn.Module):
    def __init__(self, act: Any = None, bias: bool = True) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(K, 2 * N, bias), nn.Linear(N, K, bias)
        self.act = act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.act(gate))


class UpFirst(Fused):
    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.act(gate))


class Wi(nn.Module):
    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(K, N, False), nn.Linear(N, K, False)
        self.dropout, self.act = nn.Dropout(0.0), act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.act(self.wi(x)))
        if (
            isinstance(self.wo.weight, Tensor)
            and h.dtype != self.wo.weight.dtype
            and self.wo.weight.dtype != torch.int8
        ):
            h = h.to(self.wo.weight.dtype)
        return self.wo(h)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        if self.bias is None:
            return y
        return y + self.bias


class CastLinear(nn.Linear):
    """As trainers write it that keep weights in float32."""

    def __init__(self, k: int, n: int, bias: bool = False) -> None:
        super().__init__(k, n, bias)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.uniform_(-0.2, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class OfOwnLinears(nn.Module):
    def __init__(self, act: Any = None, kind: Any = OwnLinear) -> None:
        super().__init__()
        # without bias, whose sum under autocast is not that of nn.Linear
        self.dense_h_to_4h, self.dense_4h_to_h = kind(K, N, False), kind(N, K, False)
        self.act = act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class Intermediate(nn.Module):
    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(K, N), act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        return self.intermediate_act_fn(x)


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm, self.dropout = nn.Linear(N, K), nn.LayerNorm(K), nn.Dropout(0.1)

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        hidden = self.dense(hidden)
        return self.norm(self.dropout(hidden) + x)


class Split(nn.Module):
    """A block as BERT has it."""

    def __init__(self, act: Any = None, output: Callable[[], nn.Module] = Output) -> None:
        super().__init__()
        self.intermediate, self.output = Intermediate(act), output()

    def chunk(self, x: Tensor) -> Tensor:
        hidden = self.intermediate(x)
        return self.output(hidden, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.chunk(x)


class Told(nn.Module):
    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(K, N), nn.Linear(N, K), act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


class Adapter(nn.Module):
    """A low-rank adapter that exposes the weight of its base, as in peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 4, False, dtype=base.weight.dtype)
        self.up = nn.Linear(4, base.out_features, False, dtype=base.weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 3 * self.up(self.down(x))


class Wrapped(nn.Module):
    """A wrapper that may exchange the weight while it calls its layer, as peft does for ``target_parameters``."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x)  # type: ignore[no-any-return]


def sequence(act: Any = None) -> nn.Module:
    return nn.Sequential(nn.Linear(K, N), act or nn.ReLU(), nn.Linear(N, K), nn.Dropout(0.0))


def encoder_layer(act: Any = None) -> nn.Module:
    return nn.TransformerEncoderLayer(K, 4, N, dropout=0.0, activation=act or F.relu, batch_first=True)


class Form(NamedTuple):
    """A module, the name of its layer in ``model``, and what its layer computes."""

    make: Callable[[], nn.Module]
    layer: str = "1"
    activation: str = "relu"
    threshold: float = 0


FORMS = {
    "gated": Form(Gated),
    "gated, bias": Form(lambda: Gated(bias=True)),
    "plain": Form(Plain),
    "literal": Form(Literal),
    "block": Form(Block, "1.fc2"),
    "block, function": Form(lambda: Block(act=F.relu, bias=False), "1.fc2"),
    "relu2": Form(lambda: Gated(Squared()), activation="relu2"),
    "drelu": Form(DoubleReLU, activation="drelu"),
    "own fatrelu": Form(lambda: Gated(FATReLU()), "1", "fatrelu", 0.25),
    "small fatrelu": Form(lambda: Gated(FATReLU(1e-6)), "1", "fatrelu", 1e-6),
    "fatrelu in code": Form(CodedThreshold, "1", "fatrelu", 0.25),
    "w1 w3 w2": Form(Meta),
    "fused": Form(Fused),
    "fused, up first": Form(UpFirst),
    "wi wo": Form(Wi),
    "own linear": Form(lambda: OfOwnLinears(Squared()), activation="relu2"),
    "casting": Form(lambda: OfOwnLinears(Squared(), CastLinear), activation="relu2"),
    "split": Form(Split, "1.output.dense"),
    "sequence": Form(sequence),
    "encoder, relu2": Form(lambda: encoder_layer(Squared()), "1.linear2", "relu2"),
    "told": Form(lambda: Told(Squared()), activation="relu2"),
}
EACH = pytest.mark.parametrize("form", FORMS)


def model(form: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(K), FORMS[form].make(), nn.LayerNorm(K)).to(dtype).eval()


def tokens(dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    return torch.randn(2, 7, K, generator=torch.Generator().manual_seed(1), dtype=dtype, **options)


def pickled(m: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(m))


def written(code: str, base: type[nn.Module], names: dict[str, Any]) -> type[Any]:
    """A subclass of ``base`` with this body of ``forward(self, x)``, or these methods.

    names: the globals of the code. A table of codes says what each class is where it says why it is refused.
    """
    body = textwrap.dedent(code).strip()
    if "def forward" not in body and "forward = " not in body:
        body = "def forward(self, x):\n" + textwrap.indent(body, "    ")
    made: dict[str, Any] = {"Base": base}
    exec("class Written(Base):\n" + textwrap.indent(body, "    ") + "\n", names, made)
    return made["Written"]  # type: ignore[no-any-return]
