"""TMA and bulk copies, and copies between the CTAs of a cluster through distributed shared memory."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

# A cache policy of bulk copies, as a value: evict_first for all lines.
EVICT_FIRST = 0x12F0000000000000


def staged(stages: tuple[Any, ...], layouts: tuple[Any, ...]) -> Any:
    """The stages of operands in shared memory as tensors with these layouts."""
    return [memory.get_tensor(layout.outer, swizzle=layout.inner) for memory, layout in zip(stages, layouts)]


class Transfer(NamedTuple):
    """A TMA copy and its tensor."""

    atom: Any
    tensor: Any


def tma_load(tensor: Any, layout: Any, box: tuple[int, int], peers: int = 1) -> Transfer:
    """A TMA load of one stage's tile, split over the `peers` CTAs that share it."""
    op = cpasync.CopyBulkTensorTileG2SMulticastOp() if peers > 1 else cpasync.CopyBulkTensorTileG2SOp()
    stage = cute.slice_(layout, (None, None, 0))
    return Transfer(*cpasync.make_tiled_tma_atom(op, tensor, stage, box, num_multicast=peers))


def partition(transfer: Transfer, target: Any, box: tuple[int, int], rank: Any = 0, peers: int = 1) -> Any:
    """Stages in shared memory and tiles in global memory of a TMA load that `peers` CTAs share."""
    tiles = cute.local_tile(transfer.tensor, box, (None,) * cute.rank(transfer.tensor))
    layout, rank = cute.make_layout(peers), rank if peers > 1 else 0
    return cpasync.tma_partition(
        transfer.atom, rank, layout, cute.group_modes(target, 0, 2), cute.group_modes(tiles, 0, 2)
    )


# Distributed shared memory: `source` and `target` are addresses in this CTA and name the same offset in CTA `rank`.


@cute.jit
def load_peer(source: Any, rank: Int32) -> Any:
    """Load four fp32 values, 16-byte aligned, from CTA `rank` of the cluster."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[cute.arch.map_dsmem_ptr(source, rank).toint()],
    )


@cute.jit
def send(target: Any, barrier: Any, rank: Int32, *values: Any) -> None:
    """Store one fp32 value, or two or four words, to CTA `rank`, asynchronously; completes their bytes on its mbarrier.

    The address is aligned to all of them.
    """
    kind = {1: "f32", 2: "v2.b32", 4: "v4.b32"}[len(values)]
    numbers = ", ".join(f"{{$r{i + 1}}}" for i in range(len(values)))
    cute.arch.inline_ptx(
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes.{kind}"
        f" [{{$r0}}], {numbers if len(values) == 1 else f'{{ {numbers} }}'}, [{{$r{len(values) + 1}}}];",
        read_only_args=[
            cute.arch.map_dsmem_ptr(target, rank).toint(),
            *values,
            cute.arch.map_dsmem_ptr(barrier, rank).toint(),
        ],
    )


@cute.jit
def load_row(target: Any, source: Int64, size: Int32, barrier: Any) -> None:
    """Copy `size` bytes, a multiple of 16, to shared memory by one bulk copy; completes them on an mbarrier.

    Weights that are read once leave L2 to the rest.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        read_only_args=[target, source, size, barrier, Int64(EVICT_FIRST)],
    )
