"""RWKV-7's channel mixing of flash-linear-attention: prompts, and steps with the state of the one before."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import twell

rwkv7 = pytest.importorskip("fla.models.rwkv7.modeling_rwkv7")

HIDDEN, NEURONS = 64, 256


class State:
    """What the block asks of a cache: the last token of each layer."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Any]] = [{"ffn_state": None}]

    def __getitem__(self, layer: int) -> dict[str, Any]:
        return self.layers[layer]

    def update(self, ffn_state: Tensor, layer_idx: int, offset: int) -> None:
        self.layers[layer_idx]["ffn_state"] = ffn_state


def shifted(x: Tensor, cu_seqlens: None = None, cache: Tensor | None = None, output_cache: bool = False) -> Any:
    """As fla's kernel, which needs a GPU: the token before less this one, and the last token."""
    first = torch.zeros_like(x[:, :1]) if cache is None else cache.view_as(x[:, :1])
    return torch.cat([first, x[:, :-1]], 1) - x, x[:, -1:]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    if torch.cuda.is_available():
        return "cuda"
    monkeypatch.setattr(rwkv7, "token_shift", shifted)
    return "cpu"


@pytest.mark.parametrize("strategy", ["row", "union", "auto"])
def test_prompts_steps_and_training(strategy: Any, device: str) -> None:
    torch.manual_seed(0)
    dense = rwkv7.RWKV7FeedForward(HIDDEN, intermediate_size=NEURONS, layer_idx=0, num_hidden_layers=2)
    torch.nn.init.normal_(dense.value.weight, std=0.1)
    dense = torch.nn.ModuleList([dense.to(device, torch.bfloat16)])
    sparse = twell.sparsify_(copy.deepcopy(dense), strategy=strategy)
    assert sparse[0].value.activation == "relu2"  # type: ignore[union-attr]
    # its activation compiles itself
    with torch.compiler.set_stance("force_eager"):
        results: list[list[Tensor]] = []
        for block in (sparse[0], dense[0]):
            draw, state, found = torch.Generator().manual_seed(1), State(), list[Tensor]()
            for tokens in (9, 1, 1):
                x = torch.randn(2, tokens, HIDDEN, generator=draw).to(device, torch.bfloat16)
                with torch.no_grad():
                    found.append(block(x, state=state)[0])
            y = block(torch.randn(2, 9, HIDDEN, generator=draw).to(device, torch.bfloat16))[0]
            found += [y.detach(), *torch.autograd.grad(y.float().square().sum(), [*block.parameters()])]
            results.append(found)
    for ours, theirs in zip(*results):
        largest = float(theirs.abs().max())
        assert largest > 0
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * largest)
