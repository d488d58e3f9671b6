"""Layers of which a part stays the model's own code: projections that cast their weights, gates and hidden states."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ffns import BF16, Block, CastLinear, Fused, Gated, K, N, Plain, Wi, pickled, take, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrize

import twell
from twell.integrations.sparsify import layers


def casting(m: nn.Module) -> nn.Sequential:
    for parent in list(m.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, CastLinear(child.in_features, child.out_features))
    return nn.Sequential(m)


class CastsInCode(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(F.linear(x, self.up_proj.weight.to(x.dtype)))
        return F.linear(h, self.down_proj.weight.to(x.dtype))


CASTING: dict[str, Any] = {
    "gated": Gated,
    "plain": lambda: Plain(bias=False),
    "fused": lambda: Fused(bias=False),
    "block": lambda: Block(bias=False),
    "casts in code": lambda: CastsInCode(bias=False),
}


@pytest.mark.parametrize(("strategy", "compiled"), [("union", False), ("union", True), ("auto", False)])
@pytest.mark.parametrize("form", CASTING)
def test_x_of_another_dtype_than_the_weights(form: str, strategy: Any, compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    dense = casting(CASTING[form]()) if form != "casts in code" else nn.Sequential(CASTING[form]())
    sparse = copy.deepcopy(dense)
    take(sparse, strategy=strategy)
    sparse = pickled(copy.deepcopy(sparse))
    run = torch.compile(sparse, backend="eager") if compiled else sparse
    # a norm of float32 takes no other wide dtype
    for dtype in (BF16, torch.float32, torch.float64)[: 2 if form == "block" else 3]:
        for training in (True, False):
            results = []
            for m, call in ((sparse, run), (dense, dense)):
                x = tokens().to(dtype).requires_grad_()
                torch.manual_seed(0)
                with torch.set_grad_enabled(training):
                    y = call(x)
                assert y.dtype == dtype
                wanted = [x, *(p for n, p in m.named_parameters() if "norm" not in n and "final" not in n)]
                results.append([y.detach(), *(torch.autograd.grad(y.square().sum(), wanted) if training else ())])
            for ours, theirs in zip(*results):
                largest = float(theirs.abs().max())
                rounding = {"rtol": 3e-2, "atol": 3e-2 * largest} if dtype == BF16 else {}
                torch.testing.assert_close(ours, theirs, **rounding)


def test_main_gradients_and_counts_of_casting_layers() -> None:
    m = casting(Plain(bias=False))
    dense = copy.deepcopy(m)
    take(m, strategy="union")
    (layer,) = layers(m).values()
    layer.accumulate_main_grad = True
    for p in m.parameters():
        p.main_grad = torch.zeros_like(p)
    x = tokens(BF16)
    for each in (m, dense):
        each(x).square().sum().backward()
    for p, q in zip(m.parameters(), dense.parameters()):
        torch.testing.assert_close(p.main_grad, q.grad, rtol=3e-2, atol=3e-2 * float(q.grad.abs().max()))
        assert p.grad is None
    with torch.no_grad(), twell.count_firing(m) as firing:
        m(x)
    assert 0.3 * N < float(firing["0"].counts.sum()) / 14 < 0.7 * N


class Half(nn.Linear):
    """One that computes another function of an x of another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype))
        return y if x.dtype == self.weight.dtype else 2 * y


class Scaling(nn.Linear):
    scale: float | None

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype))
        return y if self.scale is None else self.scale * y


class Twice(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Out(Plain):
    """Drops values of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.drop_rate = nn.Dropout(0.0), 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.out(super().forward(x)), self.drop_rate, self.training)


def test_a_forward_of_the_projections_that_is_replaced_later_is_called() -> None:
    m = casting(Plain(bias=False))
    for child in (m[0].up_proj, m[0].down_proj):
        child.__class__, child.scale = Scaling, None  # type: ignore[assignment]
    take(m, strategy="union")
    before = m(tokens())
    m[0].up_proj.scale = 2.0  # type: ignore[union-attr]
    torch.testing.assert_close(m(tokens()), 2 * before)
    m[0].up_proj.scale = None  # type: ignore[union-attr]
    torch.testing.assert_close(m(tokens()), before)
    m[0].down_proj.__class__ = Half  # type: ignore[assignment]
    torch.testing.assert_close(m(tokens(BF16)), 2 * before.bfloat16(), rtol=0.1, atol=0.1)


class Noise(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.1 * torch.randn_like(weight)


@pytest.mark.parametrize("form", ["gated", "plain", "fused"])
def test_a_parametrization_that_draws_is_read_once(form: str) -> None:
    dense = nn.Sequential(CASTING[form]())
    results = []
    for m in (dense, take(copy.deepcopy(dense), strategy="union")):
        for linear in [each for each in m.modules() if isinstance(each, nn.Linear)]:
            parametrize.register_parametrization(linear, "weight", Noise())
        torch.manual_seed(1)
        results.append((m(tokens()), torch.rand(1)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", [False, True])
def test_a_dropout_behind_the_layer_that_drops_later_raises(share: bool) -> None:
    """A loop over all modules finds it, and it has no effect, as the module's code is gone."""
    m: Any = take(nn.Sequential(Out()))
    if share:
        m[0].drop_rate = 0.5
    else:
        (dropout,) = (part for part in m.modules() if isinstance(part, nn.Dropout))
        dropout.p = 0.5
    if not share:
        # code may leave out whether it trains
        m.eval()(tokens())
    with pytest.raises(NotImplementedError, match=r"must drop nothing, as when sparsify_ made .* got p = 0\.5"):
        m.train()(tokens())


@pytest.mark.parametrize("change", ["hook", "forward", "subclass"])
def test_what_changes_the_hidden_state_later_is_called(change: str) -> None:
    m = nn.Sequential(Wi()).eval()
    take(m, strategy="union")
    before, drop = m(tokens()), m[0].dropout
    if change == "hook":
        drop.register_forward_hook(lambda module, given, output: 2 * output)
    elif change == "forward":
        drop.forward = lambda x: 2 * x
    else:
        m[0].dropout = Twice(0.5).eval()
    torch.testing.assert_close(m(tokens()), 2 * before)


def test_linears_that_do_not_cast_refuse_another_dtype_as_before() -> None:
    m = nn.Sequential(Plain())
    take(m)
    with pytest.raises(TypeError, match=r"must be torch\.bfloat16 as x is, got torch\.float32"):
        m(tokens(BF16))


def test_parameters_without_modules_are_pointed_to_the_functions() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_fc, self.c_proj = nn.Parameter(torch.ones(N, K)), nn.Parameter(torch.ones(K, N))

    with pytest.raises(ValueError, match=r"has c_fc, c_proj as parameters.*twell\.sparse_ffn"):
        twell.sparsify_(nn.Sequential(Bare()), names=("c_fc", "c_proj"))


# Gates and hidden states of the model's own code.


def gemma3n(**fields: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": K, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
    sizes |= {"num_kv_shared_layers": 0, "laurel_rank": 8, "max_position_embeddings": 64, "num_hidden_layers": 3}
    torch.manual_seed(0)
    pattern = {"activation_sparsity_pattern": [0.95, 0.95, 0.0], "pad_token_id": 0, "bos_token_id": 1}
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**sizes, **pattern, **fields))


def rwkv() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": K, "attention_hidden_size": K, "intermediate_size": 128}
    torch.manual_seed(0)
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes, num_hidden_layers=2, context_length=64))


@pytest.mark.parametrize("make", [gemma3n, rwkv])
def test_models_that_make_zeros_by_code_of_their_own(make: Any) -> None:
    from twell.integrations.transformers import sparsify

    dense = make()
    sparse = copy.deepcopy(dense)
    sparsify(sparse, strategy="union")
    assert len(layers(sparse)) == 2
    sparse, ids = pickled(copy.deepcopy(sparse)), torch.randint(2, 64, (2, 9))
    for m in (sparse, dense):
        m.train()
    torch.testing.assert_close(*(m(input_ids=ids, labels=ids).loss for m in (sparse, dense)))
    said = [m.eval().generate(ids[:1], max_new_tokens=6, do_sample=False) for m in (sparse, dense)]
    assert torch.equal(*said)
    assert sparse.state_dict().keys() == dense.state_dict().keys()
    for layer in layers(sparse).values():
        layer.record_aux = True
        for name, value in (("activation", "fatrelu"), ("threshold", 0.5)):
            with pytest.raises(ValueError, match="the model's own code applies the activation"):
                setattr(layer, name, value)
    with torch.no_grad():
        sparse(input_ids=ids)
    assert all(0 < float(layer.aux.l0) < 0.8 * 128 for layer in layers(sparse).values())
    with torch.no_grad(), twell.count_firing(sparse) as firing:
        sparse(input_ids=ids)
    if make is gemma3n:
        with pytest.raises(NotImplementedError, match="must make its gate itself"):
            twell.compact(sparse, firing)
        with pytest.raises(TypeError, match="got a GivenGatedMLP"):
            twell.quantize_(copy.deepcopy(sparse).bfloat16())
    # what `twell.analyze` counts is what calls count, before `sparsify` and after
    for model in (sparse, dense):
        counted = twell.analyze(model, [{"input_ids": ids}]).layers
        for found, layer in zip(counted, layers(sparse).values(), strict=True):
            assert found.mean == pytest.approx(float(layer.aux.l0))


def test_a_gate_of_its_own_code_compiles_and_has_figures_in_16_bits() -> None:
    from twell.integrations.transformers import sparsify

    dense = gemma3n().to(BF16).eval()
    mlp = sparsify(copy.deepcopy(dense), strategy="row").model.layers[0].mlp
    x = tokens(BF16)
    with torch.no_grad():
        expected = dense.model.layers[0].mlp(x)
        for run in (mlp, torch.compile(mlp, backend="eager")):
            torch.testing.assert_close(run(x), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
    assert "the model's own code" in str(twell.explain(mlp)) or "a gate that is called" in str(twell.explain(mlp))
