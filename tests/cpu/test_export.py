"""Graphs for any number of tokens: ``torch.export``, saved and loaded, and an engine's one trace."""

import dataclasses
import io
from typing import Any

import pytest
import torch
from auto_layers import Arrivals
from torch import Tensor, nn
from torch.export import Dim

import twell
from tests.habits.entries import ENTRIES, Call
from twell import testing
from twell.choose import cards, measurement
from twell.choose import site as sites
from twell.choose.plan import route_of

K, N = 16, 264


def layer(strategy: Any, name: str = "SparseGatedMLP") -> Call:
    """A module of ``ENTRIES`` and 300 tokens, integers of which every strategy makes the same."""
    more = " gated=False biases=up+down" if name == "SparseMLP" else " biases=gate+up+down"
    line = f"layer m=300 k={K} n={N} density=0.1{more}"
    return dataclasses.replace(ENTRIES[name], line=line).call(strategy)


class Figures(nn.Module):
    """A layer with its figures."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Any:
        return self.mlp(x, return_aux=True)


def saved(exported: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("how", ["saved", pytest.param("compiled ahead of time", marks=pytest.mark.nightly)])
@torch.no_grad()
def test_a_loaded_program_chooses_by_what_it_measures(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """It has a site of its own, which lasts as long as its weights."""
    monkeypatch.setattr(cards.imposed, "__code__", (lambda kind, index: "").__code__)
    monkeypatch.setattr(measurement, "Transfer", Arrivals())
    monkeypatch.setattr(sites, "_SITES", {})
    own, right = layer("auto"), layer("row")()
    mlp, x = own.run, own.given["x"]
    exported = torch.export.export(mlp, (x[:100],), dynamic_shapes=({0: Dim("m", min=2, max=4096)},))
    assert not sites._SITES
    if how == "saved":
        call: Any = saved(exported).module()
    else:
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "layer.pt2"))
        call = torch._inductor.aoti_load_package(package)
    sites._SITES.clear()
    for m in (300, 300, 300, 7):
        testing.assert_same(call(x[:m]), right[:m])
    ((_, site),) = sites._SITES.values()
    rows = {row.tokens: row for row in site.explain()}
    assert {tokens: row.calls for tokens, row in rows.items()} == {"5 to 8": 1, "257 to 512": 3}
    fired = mlp.gate_proj.float()(x.float()) > 0
    assert rows["257 to 512"].figures.nonzeros == pytest.approx(fired.sum().item() / 300)
    assert twell.explain(mlp).rows[0].calls == 0


@pytest.mark.parametrize("name", ["auto", "row", "union", "union+screen", "dense", "row+invariant"])
@torch.inference_mode()
def test_an_engines_one_trace_chooses_by_the_real_number_of_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a serving engine calls it: views of one merged weight, traced once with symbolic tokens."""
    torch.compiler.reset()
    monkeypatch.setattr(cards, "imposed", lambda kind, index: "")
    monkeypatch.setattr(measurement, "Transfer", Arrivals())
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


@pytest.mark.parametrize(("name", "strict"), [("SparseGatedMLP", True), ("SparseMLP", True), ("SparseGatedMLP", False)])
def test_a_layer_that_needs_gradients_exports_dense_only(
    name: str, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strict export leaves the gradients of sparse strategies out, without a word."""
    monkeypatch.setattr(cards.imposed, "__code__", (lambda kind, index: "").__code__)
    x = layer("dense", name).given["x"]

    def export(mlp: nn.Module) -> Any:
        torch.compiler.reset()
        sizes = ({0: Dim("m", min=1, max=4096)},)
        return torch.export.export(mlp, (x[:100],), dynamic_shapes=sizes, strict=strict)

    for strategy in ("row", "union"):
        mlp = Figures(layer(strategy, name).run)
        with pytest.raises(Exception, match=r"exports inference alone.*export under torch\.no_grad\(\), with frozen"):
            export(mlp)
        assert "twell" in export(mlp.requires_grad_(False)).graph_module.code

    dense = Figures(layer("dense", name).run)
    for strategy in ("auto", "dense", twell.AutoStrategy()):
        exported = export(Figures(layer(strategy, name).run))
        assert "torch.ops.twell" not in exported.graph_module.code
        call = exported.module()
        for m in (7, 257):
            y, aux = call(x[:m])
            got = torch.autograd.grad(y.float().sum() + aux.l1, list(call.parameters()))
            eager, figures = dense(x[:m])
            wanted = torch.autograd.grad(eager.float().sum() + figures.l1, list(dense.parameters()))
            assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("strict", [False, True])
def test_a_named_strategy_is_not_exported_to_onnx(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in an error of torch's about an operator without a translation."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    layer = twell.nn.SparseGatedMLP(K, N, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.zeros(4, K, dtype=torch.bfloat16)
    for strategy in ("row", "union"):
        layer.strategy = strategy
        with pytest.raises(Exception, match=f'strategy="{strategy}" cannot be exported to ONNX'):
            torch.export.export(layer, (x,), strict=strict)
    for strategy in ("auto", "dense"):
        layer.strategy = strategy
        graph = torch.export.export(layer, (x,), strict=strict).graph
        assert not any("twell" in str(node.target) for node in graph.nodes)
