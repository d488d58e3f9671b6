"""The operators and ``pack`` on DTensors: tokens may be sharded, anything else is replicated or refused."""

from typing import Any

import pytest
import torch
from ranks import Run, in_turn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import twell
import twell.distributed
from twell import ops

HIDDEN, NEURONS, COMPRESSION = 32, 272, 8


def layer(m: int) -> dict[str, Tensor]:
    """Small integers: sums are exact for any number of rows."""
    generator = torch.Generator().manual_seed(m)
    shapes = {"x": (m, HIDDEN), "w_gate": (NEURONS, HIDDEN), "w_up": (NEURONS, HIDDEN), "w_down": (NEURONS, HIDDEN)}
    shapes |= {"b_gate": (NEURONS,), "b_up": (NEURONS,), "b_down": (HIDDEN,)}
    return {name: torch.randint(-3, 4, shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def same(ours: object, expected: object, placements: tuple[Placement, ...] | None, what: str) -> None:
    assert isinstance(ours, DTensor), what
    assert isinstance(expected, Tensor)
    assert placements is None or ours.placements == placements, f"{what}: {ours.placements}"
    assert torch.equal(ours.full_tensor(), expected), what


def token_by_token(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2,))
    for m, block in ((256, 128), (130, 1), (1, 1)):
        t = layer(m)
        words, spill, _ = ops.gate_pack(t["x"], t["w_gate"], t["b_gate"], COMPRESSION)
        whole = (*(t[name] for name in ("x", "w_gate", "w_up", "w_down", "b_gate", "b_up")), None)
        answers: dict[str, tuple[Any, tuple[Any, ...], int]] = {
            "gate_pack": (ops.gate_pack, (t["x"], t["w_gate"], t["b_gate"], COMPRESSION), 64),
            "unpack": (ops.unpack, (words, spill, NEURONS, COMPRESSION), 1),
            "ffn": (ops.ffn, (*whole, COMPRESSION, "union", None), 128),
            # sums over all tokens: nothing is sharded
            "ffn_aux": (ops.ffn_aux, (*whole, COMPRESSION, "row", None), 512),
            "gate_pack, fatrelu": (ops.gate_pack, (t["x"], t["w_gate"], t["b_gate"], COMPRESSION, 2.0), 64),
            "ffn, fatrelu": (ops.ffn, (*whole, COMPRESSION, "union", None, "fatrelu", 2.0), 128),
            "ffn_aux, relu2": (ops.ffn_aux, (*whole, COMPRESSION, "row", None, "relu2"), 512),
            "reglu, relu2": (ops.reglu, (t["x"], t["x"] + 1, "relu2"), 1),
            "reglu_backward, fatrelu": (ops.reglu_backward, (t["x"], t["x"] + 1, t["x"] - 1, "fatrelu", 2.0), 1),
            "reglu": (ops.reglu, (t["x"], t["x"] + 1), 1),
            "reglu_backward": (ops.reglu_backward, (t["x"], t["x"] + 1, t["x"] - 1), 1),
        }
        for name, (op, arguments, needed) in answers.items():
            expected = op(*arguments)
            sharded = [
                distribute_tensor(a, mesh, [Shard(0) if a.shape[0] == m else Replicate()])
                if isinstance(a, Tensor)
                else a
                for a in arguments
            ]
            ours = op(*sharded)
            kept: tuple[Placement, ...] | None = (Shard(0),) if block >= needed and m > 1 else None
            if isinstance(expected, Tensor):
                ours, expected = (ours,), (expected,)
            for got, answer in zip(ours, expected):
                # the values of tiles that are not spilled are undefined, on the CPU zero
                same(got, answer, kept, f"{name} of {m} tokens")
    for kind in (Shard(0), Shard(1)):
        x = distribute_tensor(layer(8)["x"], mesh, [kind])
        same(ops.reglu(x, x), ops.reglu(layer(8)["x"], layer(8)["x"]), (kind,), "reglu")


def refused(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2,))
    t = {name: distribute_tensor(tensor, mesh, [Replicate()]) for name, tensor in layer(4).items()}
    with pytest.raises(Exception, match=r"take no DTensors.*call twell.sparse_gated_ffn"):
        ops.hybrid_forward(t["x"], t["w_gate"], t["w_up"], t["w_down"], None, None, None, COMPRESSION)


def packs(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2,))
    t = layer(256)
    x, w_gate = t["x"].view(2, 128, HIDDEN), t["w_gate"]
    single = twell.pack(x, w_gate, t["b_gate"])
    replicated = {name: distribute_tensor(t[name], mesh, [Replicate()]) for name in ("w_gate", "b_gate")}
    for kind in (Replicate(), Shard(0), Shard(1), Shard(2)):
        packed = twell.pack(distribute_tensor(x, mesh, [kind]), *replicated.values())
        assert packed.shape == single.shape
        for ours, expected in (
            (packed.words, single.words),
            (packed.spill, single.spill),
            (packed.stats, single.stats),
        ):
            same(ours, expected, (Shard(0),) if kind == Shard(0) else None, f"pack of x {kind}")
        same(packed.unpack(), single.unpack(), None, "unpack")
        if kind == Shard(0):
            same(packed.nnz(), single.nnz(), None, "nnz")
    uneven = torch.cat([x, x[:1]])
    packed = twell.pack(distribute_tensor(uneven, mesh, [Shard(0)]), replicated["w_gate"])
    same(packed.unpack(), twell.pack(uneven, w_gate).unpack(), None, "pack of three sequences")
    same(
        twell.pack(distribute_tensor(x[0, 0], mesh, [Shard(0)]), replicated["w_gate"]).unpack(),
        twell.pack(x[0, 0], w_gate).unpack(),
        None,
        "pack of one token",
    )
    with pytest.raises(NotImplementedError, match=r"pack: w_gate must be Replicate, got .*Shard.*to_local"):
        twell.pack(distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(w_gate, mesh, [Shard(0)]))
    with pytest.raises(TypeError, match="pack: x must be a DTensor as w_gate is, got Tensor"):
        twell.pack(x, replicated["w_gate"])
    # the message
    own = twell.pack(x, distribute_tensor(w_gate, mesh, [Shard(0)]).to_local())
    gathered = DTensor.from_local(own.unpack(), mesh, [Shard(2)]).full_tensor()
    assert torch.equal(gathered, twell.pack(x, w_gate).unpack())


def test_operators_on_dtensors(cpu_ranks: Run) -> None:
    cpu_ranks(2, in_turn, token_by_token, refused, packs)
