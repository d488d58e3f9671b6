"""The functions on DTensors whose neurons ranks divide: results and gradients of one process."""

import itertools
from typing import Any

import pytest
import torch
from ranks import Run, full, in_turn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import twell
from twell.call import execution
from twell.ops.operands import Layer

BATCH, SEQUENCE, HIDDEN, NEURONS = 2, 6, 16, 32
NAMES = ("x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
COEFFICIENT = 0.3


def operands(gated: bool, dtype: torch.dtype = torch.float64, n: int = NEURONS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "x": (BATCH, SEQUENCE, HIDDEN),
        "w_gate": (n, HIDDEN),
        "w_up": (n, HIDDEN),
        "w_down": (HIDDEN, n),
        "b_gate": (n,),
        "b_up": (n,),
        "b_down": (HIDDEN,),
    }
    names = [name for name in NAMES if gated or "gate" not in name]
    return {name: torch.randn(shapes[name], generator=generator, dtype=dtype) for name in names}


def call(t: dict[str, Tensor], **options: Any) -> Any:
    function = twell.sparse_gated_ffn if "w_gate" in t else twell.sparse_ffn
    return function(**t, **{"strategy": "union", **options})  # type: ignore[arg-type]


def loss(y: Tensor, aux: twell.Aux) -> Tensor:
    """A loss of both outputs on plain tensors; torch handles arithmetic of Partial DTensors."""
    return full(y).square().sum() + COEFFICIENT * full(aux.l1)


def step(t: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in t.items()}
    y, aux = call(leaves, return_aux=True, **options)
    loss(y, aux).backward()
    return y.detach(), aux.l1.detach(), aux.l0, {name: leaf.grad for name, leaf in leaves.items()}


def tensor_parallel(name: str, x: Placement) -> Placement:
    return {"x": x, "w_down": Shard(1), "b_down": Replicate()}.get(name, Shard(0))


def crossed(name: str, x: Placement) -> Placement:
    """Shard every weight along K, which no rank can use; biases in any way."""
    return {"x": x, "w_down": Shard(0), "b_down": Shard(0), "b_up": Replicate()}.get(
        name, Shard(1 if "w" in name else 0)
    )


def one_only(name: str, x: Placement) -> Placement:
    return {"x": x, "w_down": Shard(1)}.get(name, Replicate())


def whole(t: Tensor) -> Tensor:
    assert isinstance(t, DTensor)
    return t.full_tensor()


def placed_as_one(device: torch.device, gated: bool, **form: Any) -> None:
    mesh = init_device_mesh(device.type, (2,))
    single = {name: t.to(device) for name, t in operands(gated).items()}
    y, l1, l0, gradients = step(single, **form)
    layouts = (tensor_parallel, crossed, one_only)
    for layout, x in itertools.product(layouts, (Replicate(), Shard(0), Shard(1), Shard(2))):
        sharded = {name: distribute_tensor(t, mesh, [layout(name, x)]) for name, t in single.items()}
        their_y, their_l1, their_l0, theirs = step(sharded, **form)
        where = f"{layout.__name__}, x {x}: "
        for what, ours, expected in (("y", their_y, y), ("l1", their_l1, l1), ("l0", their_l0, l0)):
            torch.testing.assert_close(whole(ours), expected, msg=lambda m, w=where + what: f"{w}: {m}")
        for name, expected in gradients.items():
            torch.testing.assert_close(whole(theirs[name]), expected, msg=lambda m, w=where + name: f"{w}: {m}")


def every_function(device: torch.device) -> None:
    for gated in (True, False):
        placed_as_one(device, gated)
    placed_as_one(device, True, activation="drelu")
    placed_as_one(device, False, activation="fatrelu", threshold=0.5)


def test_any_placement_is_one_process(cpu_ranks: Run) -> None:
    cpu_ranks(2, every_function)


def refusals(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2,))

    def sharded(n: int = NEURONS) -> dict[str, Tensor]:
        return {
            name: distribute_tensor(t, mesh, [tensor_parallel(name, Replicate())])
            for name, t in operands(True, n=n).items()
        }

    plain_x = {**sharded(), "x": operands(True)["x"]}
    with pytest.raises(TypeError, match=r"sparse_gated_ffn: x must be a DTensor as w_gate is, got Tensor; .*Parallel"):
        call(plain_x)
    with pytest.raises(NotImplementedError, match="main_grads are those of plain weights, got DTensors"):
        call(sharded(), main_grads=[None] * 3)
    with pytest.raises(TypeError, match="w_up must be a DTensor as x is, got Tensor"):
        call({**sharded(), "w_up": operands(True)["w_up"]})
    with pytest.raises(ValueError, match=r"multiple of 8 .*got N = 24 over 2 ranks: \[12\] each"):
        call(sharded(24))
    torch.testing.assert_close(whole(call(sharded(24), strategy="dense")), call(operands(True, n=24)))
    with pytest.raises(ValueError, match=r"sparse_gated_ffn: w_up must be \[32, 16\] .* got \[24, 16\]"):
        call({**sharded(), "w_up": sharded(24)["w_up"]})
    whole_weights = {name: distribute_tensor(t, mesh, [Replicate()]) for name, t in operands(True).items()}
    with pytest.raises(NotImplementedError, match="of a mesh of one dimension, over which a weight is sharded, got"):
        call(whole_weights)
    other = init_device_mesh(device.type, (2, 1))
    with pytest.raises(ValueError, match=r"b_up must be on .* as x is, got"):
        call({**sharded(), "b_up": distribute_tensor(operands(True)["b_up"], other, [Shard(0), Replicate()])})


def each_gradient_alone(device: torch.device) -> None:
    """Any subset of operands may require grad; a rank without a share of a gradient must not wait for the others."""
    mesh = init_device_mesh(device.type, (2,))
    single = operands(True)
    _, _, _, gradients = step(single)
    sharded = {name: distribute_tensor(t, mesh, [tensor_parallel(name, Shard(1))]) for name, t in single.items()}
    for name in NAMES:
        leaves = {other: t.detach().requires_grad_(other == name) for other, t in sharded.items()}
        y, aux = call(leaves, return_aux=True)
        loss(y, aux).backward()
        torch.testing.assert_close(whole(leaves[name].grad), gradients[name])
        if name not in ("b_down", "w_down"):
            leaves[name].grad = None
            call(leaves, return_aux=True)[1].l1.backward()
            of_l1 = {other: t.detach().requires_grad_(other == name) for other, t in single.items()}
            call(of_l1, return_aux=True)[1].l1.backward()
            torch.testing.assert_close(whole(leaves[name].grad), of_l1[name].grad)


def still_under_way(device: torch.device) -> None:
    """Return x with a pending collective, as torch's styles pass it on."""
    mesh = init_device_mesh(device.type, (2,))
    single = operands(True)
    _, _, _, gradients = step(single)
    sharded = {
        name: distribute_tensor(t, mesh, [tensor_parallel(name, Shard(0))]).requires_grad_()
        for name, t in single.items()
    }
    gathered = sharded["x"].redistribute(placements=[Replicate()], async_op=True)
    seen: list[type] = []
    original = execution.run

    def note(how: execution.Call, layer: Layer, *rest: Any) -> Any:
        seen.append(type(layer.x))
        return original(how, layer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "run", note)
        y, aux = call({**sharded, "x": gathered}, return_aux=True)
    loss(y, aux).backward()
    torch.testing.assert_close(whole(sharded["x"].grad), gradients["x"])
    assert seen == [Tensor]


def test_placements_refusals_gradients(cpu_ranks: Run) -> None:
    of_layers = (refusals, each_gradient_alone, still_under_way)
    cpu_ranks(2, in_turn, *of_layers)


def exact_operands(device: torch.device) -> dict[str, Tensor]:
    """Sparse small integers: every sum, and each of two ranks' share of it, is exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    m, k, n = (256, 256, 1024) if device.type == "cuda" else (64, 64, 128)

    def draw(share: float, *shape: int) -> Tensor:
        drawn = torch.rand(shape, generator=generator)
        return ((drawn < share).float() - (drawn < share / 2).float() * 2).bfloat16().to(device)

    return {
        "x": draw(16 / k, m, k),
        "w_gate": draw(1 / 4, n, k),
        "w_up": draw(1 / 4, n, k),
        "w_down": draw(1 / 32, n, k).t(),
        "b_gate": torch.full((n,), -2.0).bfloat16().to(device),
        "b_up": draw(1 / 2, n),
        "b_down": draw(1 / 2, k),
    }


def exact_step(t: dict[str, Tensor], dy: Tensor, **options: Any) -> dict[str, Tensor]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in t.items()}
    y, aux = call(leaves, return_aux=True, **options)
    # an upstream gradient of 1 for each token
    ((full(y) * dy).sum() + dy.shape[0] * full(aux.l1)).backward()
    return {"y": y.detach(), "l1": aux.l1.detach(), "l0": aux.l0} | {name: leaf.grad for name, leaf in leaves.items()}


def bit_by_bit(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2,))
    single = exact_operands(device)
    dy = (single["x"].roll(1, 0) * single["x"].roll(1, 1).abs()).bfloat16()
    n = single["w_up"].shape[0]
    for half in (slice(0, n // 2), slice(n // 2, n)):
        own = {name: t.double().cpu() for name, t in single.items()}
        own |= {name: own[name][half] for name in ("w_gate", "w_up", "b_gate", "b_up")}
        own["w_down"] = own["w_down"][:, half]
        partial = exact_step(own, dy.double().cpu(), strategy="dense")
        assert 0.01 < float(partial["l0"]) / n < 0.3
        for name in ("y", "x"):
            assert torch.equal(partial[name], partial[name].bfloat16().double()), f"the part of {name} is not exact"
            assert partial[name].abs().max() > 4
    expected = exact_step(single, dy, strategy="union")
    for x in (Replicate(), Shard(0)):
        sharded = {name: distribute_tensor(t, mesh, [tensor_parallel(name, x)]) for name, t in single.items()}
        # by rows, like the modules
        sharded["w_down"] = distribute_tensor(single["w_down"].t(), mesh, [Shard(0)]).t()
        for name, ours in exact_step(sharded, dy, strategy="union").items():
            assert torch.equal(whole(ours), expected[name]), f"{name} of a step"
        with torch.no_grad():
            for strategy in ("row", "union", "auto", "dense"):
                y, aux = call(sharded, strategy=strategy, return_aux=True)
                assert torch.equal(whole(y), expected["y"]), f"y of {strategy}"
                assert torch.equal(whole(aux.l1), expected["l1"]), f"l1 of {strategy}"
                assert torch.equal(whole(aux.l0), expected["l0"]), f"l0 of {strategy}"


def test_bit_by_bit(two: Run) -> None:
    two(bit_by_bit)
