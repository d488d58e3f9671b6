"""Graphs for any number of tokens: ``torch.export``, and an engine's one trace."""

from typing import Any

import pytest
import torch
from auto_layers import Arrivals
from torch import Tensor

import twell
from twell import testing
from twell.choose import cards
from twell.choose import site as sites
from twell.choose.plan import route_of

K, N = 16, 264


@pytest.mark.parametrize("name", ["auto", "row", "union", "union+screen", "dense", "row+invariant"])
@torch.inference_mode()
def test_an_engines_one_trace_chooses_by_the_real_number_of_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a serving engine calls it: views of one merged weight, traced once with symbolic tokens."""
    torch.compiler.reset()
    monkeypatch.setattr(cards, "imposed", lambda kind, index: "")
    monkeypatch.setattr(sites, "Transfer", Arrivals())
    monkeypatch.setattr(sites, "_SITES", {})
    p = testing.integer_problem(300, K, N, density=0.1, biases="gate up down")
    merged, b_merged = torch.cat([p.w_gate, p.w_up]), torch.cat([p.b_gate, p.b_up])
    down = p.w_down.t()
    graphs: list[Any] = []
    route = route_of(name)

    def backend(module: Any, example: Any) -> Any:
        graphs.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, example)

    def layer(x: Tensor) -> Tensor:
        (w_gate, w_up), (b_gate, b_up) = merged.chunk(2), b_merged.chunk(2)
        tokens = x.reshape(-1, x.shape[-1])
        given = (tokens, w_gate, w_up, down.t(), b_gate, b_up, p.b_down, 8, route.strategy, w_gate)
        y = torch.ops.twell.ffn(*given, screen=route.screen, invariant=route.invariant)
        return y.view(x.shape)

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for m in (256, 7, 2, 300, 7):
        x = p.x[:m].clone()
        torch._dynamo.mark_dynamic(x, 0)
        testing.assert_same(compiled(x), testing.exact_output(p.rows(0, m)))
    assert len(graphs) == 1
    counted = {row.tokens: row.calls for _, site in sites._SITES.values() for row in site.explain()}
    assert counted == ({"129 to 256": 1, "5 to 8": 2, "2": 1, "257 to 512": 1} if name == "auto" else {})


@pytest.mark.parametrize("onnx", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_exports_are_dense(strict: bool, onnx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients too: named strategies raise."""
    monkeypatch.setattr(cards.imposed, "__code__", (lambda kind, index: "").__code__)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: onnx)
    layer = twell.nn.SparseGatedMLP(K, N, dtype=torch.bfloat16).requires_grad_(False)
    x, sizes = torch.randn(100, K).bfloat16(), ({0: torch.export.Dim("m", min=2, max=4096)},)
    for strategy in ("row", "union"):
        layer.strategy = strategy
        torch.compiler.reset()
        with pytest.raises(Exception, match=f'strategy="{strategy}" cannot be exported; use strategy="dense"'):
            torch.export.export(layer, (x,), dynamic_shapes=sizes, strict=strict)
    for strategy in ("auto", "dense"):
        layer.strategy = strategy
        torch.compiler.reset()
        exported = torch.export.export(layer, (x,), dynamic_shapes=sizes, strict=strict)
        assert not any("twell" in str(node.target) for node in exported.graph.nodes)
        torch.testing.assert_close(exported.module()(x[:7]), layer(x[:7]))
