"""``tensor_parallel_plan``: HF models divided over ranks, alone and under FSDP2, train like one process."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Run, full, in_turn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import twell
from twell import recipe
from twell.nn.distributed import SparseMLPParallel, tensor_parallel_plan

pytest.importorskip("transformers")

COEFFICIENT, VOCABULARY = 0.1, 83

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OPT: dict[str, Any] = {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1}


def make(kind: str, **changes: Any) -> Any:
    """A tiny model with twell's layers; the same on every rank, float64."""
    import transformers

    from twell.integrations import transformers as integration

    torch.manual_seed(0)
    extra = OPT | {"activation_function": "relu"} if kind == "OPT" else {"hidden_act": "relu"}
    extra = extra | ({"head_dim": 8} if kind == "Qwen3" else {})
    config = getattr(transformers, f"{kind}Config")(**SIZES | extra | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    integration.sparsify(model)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.normal_(parameter, 1.0 if name.endswith("weight") else 0.0, 0.3)
    for layer in layers(model):
        layer.record_aux = True
    return model.double()


def layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, (twell.nn.SparseGatedMLP, twell.nn.SparseMLP))]


def tokens(step: int, rank: int = 0) -> Tensor:
    return torch.randint(2, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    l1 = torch.stack([layer.aux.l1 for layer in layers(model)]).mean()
    return loss + COEFFICIENT * l1


def train(model: Any, ranks: tuple[int, ...] = (0,), fused: bool = True) -> list[list[Tensor]]:
    """Return the loss, the norm of the gradients and the clipped gradients of each step.

    Weights alone would not do: a factor of all gradients, such as clipping's, hardly changes Adam's steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    seen = []
    for step in range(2):
        loss = torch.stack([loss_of(model, tokens(step, rank)) for rank in ranks]).mean()
        loss.backward()
        for name, p in model.named_parameters():
            # what changes gradients in place does not take one that is still to be summed over ranks
            assert not isinstance(p, DTensor) or not any(each.is_partial() for each in p.grad.placements), name
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert full(norm) > 0.5
        seen.append([loss.detach(), full(norm), *(full(p.grad) for p in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def same(model: nn.Module, expected: nn.Module) -> None:
    for (name, p), (other, q) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert name == other
        assert isinstance(p, DTensor), name
        torch.testing.assert_close(p.detach().full_tensor(), q.detach(), msg=lambda m, n=name: f"{n}: {m}")


def in_parts(device: torch.device, kind: str, changes: dict[str, Any]) -> None:
    whole = make(kind, **changes)
    model = copy.deepcopy(whole)
    mesh = init_device_mesh(device.type, (2,))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    plan = tensor_parallel_plan(model)
    if kind == "Qwen2":
        # entries may be replaced
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
        for i in range(2):
            heads = f"model.layers.{i}.self_attn"
            plan |= {f"{heads}.{name}_proj": ColwiseParallel() for name in "qkv"}
            plan[f"{heads}.o_proj"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(9)).logits, whole(tokens(9)).logits)
        if kind != "OPT":
            prompt = tokens(8)[:, :4]
            generated = [m.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0) for m in (model, whole)]
            assert torch.equal(*generated)
    for ours, expected in zip(train(model), train(whole)):
        torch.testing.assert_close(ours, expected)
    same(model, whole)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"attention_bias": True, "mlp_bias": True, "pad_token_id": 0}),
    ("Qwen3", {"tie_word_embeddings": True}),
    ("Qwen2", {}),
    ("OPT", {}),
    # its own embedding class scales the rows and is tied to the head
    ("Gemma2", {"hidden_activation": "relu", "head_dim": 8}),
]


def all_in_parts(device: torch.device) -> None:
    for case in CASES:
        try:
            in_parts(device, *case)
        except Exception as error:
            raise AssertionError(str(case)) from error


def test_models_in_parts(cpu_ranks: Run) -> None:
    cpu_ranks(2, all_in_parts)


def refusals(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2,))
    x = distribute_tensor(torch.zeros(8, 16, dtype=torch.bfloat16), mesh, [Replicate()])
    with pytest.raises(NotImplementedError, match="pack: operands must be plain tensors, got DTensors"):
        twell.pack(x, x)


def plan_of_anything(device: torch.device) -> None:
    """Any other model: its layers are divided, the rest is replicated DTensors."""
    torch.manual_seed(0)
    parts = nn.Embedding(20, 16), nn.LayerNorm(16), twell.nn.SparseMLP(16, 32), nn.Linear(16, 20)
    parts[3].weight = parts[0].weight
    whole = nn.Sequential(*parts).double()
    model = copy.deepcopy(whole)
    plan = tensor_parallel_plan(model)
    assert isinstance(plan["2"], SparseMLPParallel)
    parallelize_module(model, init_device_mesh(device.type, (2,)), plan)
    ids = torch.arange(20)
    for each in (model, whole):
        each(ids).square().sum().backward()
    for p, q in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def test_refusals_and_any_model(cpu_ranks: Run) -> None:
    cpu_ranks(2, in_turn, refusals, plan_of_anything)


def both_ways(device: torch.device, kind: str) -> None:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    whole = make(kind)
    model = copy.deepcopy(whole)
    parallelize_module(model, mesh["tp"], tensor_parallel_plan(model))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    rank = mesh["dp"].get_local_rank()
    ours, expected = train(model, (rank,)), train(whole, (0, 1))
    for (loss, *rest), (answer, *others) in zip(ours, expected):
        total = loss.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / 4, answer)
        torch.testing.assert_close(rest, others)
    same(model, whole)
    assert model.model.layers[0].mlp.down_proj.weight.device_mesh.ndim == 2


def test_fsdp_of_parts(cpu_ranks: Run) -> None:
    cpu_ranks(4, both_ways, "Qwen3")


def compiled(device: torch.device) -> None:
    """Layers compiled one by one compute what the same layers do eagerly; hooks were there before the plan."""
    mesh = init_device_mesh(device.type, (2,))
    results = []
    for compile_layers in (False, True):
        torch._dynamo.reset()
        model = make("Qwen3")
        recipe.record_aux(model)
        for layer in layers(model):
            layer.strategy = "union"
        parallelize_module(model, mesh, tensor_parallel_plan(model))
        for layer in layers(model):
            for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
                assert len(hooks) == 2
                # torch 2.11 guards hooks by their order of insertion
                assert list(dict.keys(hooks)) == list(hooks)
        for block in model.model.layers if compile_layers else ():
            block.compile(backend="aot_eager", dynamic=False)
        loss = model(input_ids=tokens(0), labels=tokens(0), use_cache=False).loss + COEFFICIENT * recipe.l1_term(model)
        loss.backward()
        results.append([loss.detach(), *(p.grad.full_tensor() for p in model.parameters())])
    torch.testing.assert_close(*results)


def test_compiled_layer_by_layer(cpu_ranks: Run) -> None:
    cpu_ranks(2, compiled)
