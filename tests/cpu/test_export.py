"""Graphs for any number of tokens: ``torch.export``, saved and loaded, and an engine's one trace."""

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from auto_layers import Arrivals
from torch import Tensor, nn
from torch.export import Dim

import twell
from twell import testing
from twell.choose import cards
from twell.choose import site as sites
from twell.choose.plan import route_of

K, N = 16, 264


class Layer(nn.Module):
    """A layer with the operands of a problem, as a function call or a module."""

    def __init__(self, p: testing.FFN, gated: bool, function: bool, aux: bool, **options: Any) -> None:
        super().__init__()
        self.gated, self.function, self.aux, self.options = gated, function, aux, options
        names = ("gate", "up", "down") if gated else ("up", "down")
        weights = (p.w_gate, p.w_up, p.w_down.t()) if gated else (p.w_gate, p.w_down.t())
        biases = (p.b_gate, p.b_up, p.b_down) if gated else (p.b_gate, p.b_down)
        linears = []
        for weight, bias in zip(weights, biases, strict=True):
            linears.append(nn.Linear(*weight.shape[::-1], bias is not None, dtype=weight.dtype))
            linears[-1].load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
        if function:
            self.linears = nn.ModuleDict(dict(zip(names, linears, strict=True)))
        else:
            cls: Any = twell.nn.SparseGatedMLP if gated else twell.nn.SparseMLP
            self.mlp = cls.from_linear(*linears, **options)

    def forward(self, x: Tensor) -> Any:
        if not self.function:
            return self.mlp(x, return_aux=self.aux)
        call: Any = twell.sparse_gated_ffn if self.gated else twell.sparse_ffn
        weights = [linear.weight for linear in self.linears.values()]
        biases = {f"b_{name}": linear.bias for name, linear in self.linears.items()}
        return call(x, *weights, **biases, return_aux=self.aux, **self.options)


def problem(m: int, biases: str, dtype: torch.dtype) -> testing.FFN:
    """An integer problem: every strategy has the same right answer."""
    return testing.integer_problem(m, K, N, density=0.1, biases=biases, dtype=dtype)


def saved(exported: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("how", ["saved", "compiled ahead of time"])
@torch.no_grad()
def test_a_loaded_program_chooses_by_what_it_measures(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """It has a site of its own, which lasts as long as its weights."""
    monkeypatch.setattr(cards.imposed, "__code__", (lambda kind, index: "").__code__)
    monkeypatch.setattr(sites, "Transfer", Arrivals())
    monkeypatch.setattr(sites, "_SITES", {})
    p = problem(300, "gate up down", torch.bfloat16)
    layer = Layer(p, True, False, aux=False, strategy="auto")
    exported = torch.export.export(layer, (p.x[:100],), dynamic_shapes=({0: Dim("m", min=2, max=4096)},))
    assert not sites._SITES
    if how == "saved":
        call: Any = saved(exported).module()
    else:
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "layer.pt2"))
        call = torch._inductor.aoti_load_package(package)
    sites._SITES.clear()
    for m in (300, 300, 300, 7):
        testing.assert_same(call(p.x[:m]), testing.exact_output(p.rows(0, m)))
    ((_, site),) = sites._SITES.values()
    rows = {row.tokens: row for row in site.explain()}
    assert {tokens: row.calls for tokens, row in rows.items()} == {"5 to 8": 1, "257 to 512": 3}
    fired = torch.relu(F.linear(p.x.float(), p.w_gate.float(), p.b_gate.float())) != 0
    assert rows["257 to 512"].figures.nonzeros == pytest.approx(fired.sum().item() / 300)
    assert twell.explain(layer).rows[0].calls == 0


@pytest.mark.parametrize("name", ["auto", "row", "union", "union+screen", "dense", "row+invariant"])
@torch.inference_mode()
def test_an_engines_one_trace_chooses_by_the_real_number_of_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a serving engine calls it: views of one merged weight, traced once with symbolic tokens."""
    torch.compiler.reset()
    monkeypatch.setattr(cards, "imposed", lambda kind, index: "")
    monkeypatch.setattr(sites, "Transfer", Arrivals())
    monkeypatch.setattr(sites, "_SITES", {})
    p = problem(300, "gate up down", torch.bfloat16)
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


@pytest.mark.parametrize(
    ("gated", "function", "strict"), [(True, True, True), (False, False, True), (True, False, False)]
)
def test_a_layer_that_needs_gradients_exports_dense_only(
    gated: bool, function: bool, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strict export leaves the gradients of sparse strategies out, without a word."""
    monkeypatch.setattr(cards.imposed, "__code__", (lambda kind, index: "").__code__)
    p = problem(300, "gate up down", torch.bfloat16)
    sizes = ({0: Dim("m", min=1, max=4096)},)

    def export(layer: nn.Module) -> Any:
        torch.compiler.reset()
        return torch.export.export(layer, (p.x[:100],), dynamic_shapes=sizes, strict=strict)

    for strategy in ("row", "union"):
        layer = Layer(p, gated, function, aux=True, strategy=strategy)
        with pytest.raises(Exception, match=r"exports inference alone.*export under torch\.no_grad\(\), with frozen"):
            export(layer)
        assert "twell" in export(layer.requires_grad_(False)).graph_module.code

    dense = Layer(p, gated, function, aux=True, strategy="dense")
    for strategy in ("auto", "dense", twell.AutoStrategy()):
        layer = Layer(p, gated, function, aux=True, strategy=strategy)
        exported = export(layer)
        assert "torch.ops.twell" not in exported.graph_module.code
        call = exported.module()
        for m in (7, 257):
            y, aux = call(p.x[:m])
            got = torch.autograd.grad(y.float().sum() + aux.l1, list(call.parameters()))
            eager, figures = dense(p.x[:m])
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
