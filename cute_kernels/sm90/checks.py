"""Arrive counts of barriers, recomputed from the traced code: a wrong count fails the compile and not the run.

Nobody declares who arrives where: the conditions around each barrier are evaluated for every thread of every CTA of a
cluster. What depends on data may be true or false. So these are the threads that can reach a barrier, and:

    mbarrier       One thread initialises it. Its count is the number of threads that arrive, from all CTAs of the
                   cluster. A thread that arrives in several places by the same instruction does so once in a phase.
    named barrier  All places name the same number of threads, and exactly these, whole warps, reach one of the places.
    sync_threads   All threads reach each place, or the places of several roles together.
    cluster        All threads reach a place that arrives and a place that waits.
    sync_warp      Whole warps reach each place.

If data decides which warps never come to a named barrier, the kernel says so: `absent` holds them by its index.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

WARP, NAMED_BARRIERS, MBARRIER_BYTES = 32, 16, 8

_OPERATION = re.compile(r'(?:(%\w+)(?::\d+)? = )?"([\w.]+)"\(([^)]*)\)')
_CONSTANT = re.compile(
    r'"(?:arith\.constant|cute\.make_int_tuple)"\(\) .*?(?:value = |<")(true|false|-?\d+)(?: : \w+)?["}]'
)
_BARRIER = re.compile(r"nvvm\.(mbarrier|barrier|cp\.async\.mbarrier|cluster\.(arrive|wait)|bar\.warp)")
_BARRIER_IN_PTX = re.compile(r"mbarrier\.(init|arrive)|\bbar(rier)?\.|tcgen05\.commit")
# integers without bits
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "arith.addi": operator.add,
    "arith.subi": operator.sub,
    "arith.muli": operator.mul,
    "arith.divsi": lambda a, b: a // np.where(b == 0, 1, b),
    "arith.remsi": lambda a, b: a % np.where(b == 0, 1, b),
    "arith.andi": operator.and_,
    "arith.ori": operator.or_,
    "arith.xori": operator.xor,
    "arith.shli": lambda a, b: a << (b & 63),
    "arith.shrui": lambda a, b: a >> (b & 63),
}
_BINARY |= {"arith.floordivsi": _BINARY["arith.divsi"], "arith.divui": _BINARY["arith.divsi"]}
_BINARY |= {"arith.remui": _BINARY["arith.remsi"], "arith.shrsi": _BINARY["arith.shrui"]}
# by the number of the predicate
_COMPARE = (operator.eq, operator.ne, *2 * (operator.lt, operator.le, operator.gt, operator.ge))
# they return their operand
_SAME = {"arith.extui", "arith.extsi", "arith.trunci", "builtin.unrealized_conversion_cast", "cute.assume"}
_SAME |= {"cute.get_iter", "cute.recast_iter", "cute.make_int_tuple", "cute.to_int_tuple", "cute.get_scalars"}


class BarrierError(ValueError):
    """A barrier has a wrong count, or the wrong threads reach it."""


@dataclass(eq=False)
class Operation:
    """An operation of the traced code; operands are results of others by index, None for arguments of blocks."""

    name: str
    operands: list[tuple[Operation, int] | None]
    text: str
    regions: list[list[Operation]] = field(default_factory=list)
    values: list[Values] = field(default_factory=list)


class Values(NamedTuple):
    """Integers or addresses [CTA, thread]: what they are if all that is unknown, as the state of a loop, is 0."""

    data: Any
    known: Any
    # the CTA of an address, if not the thread's own
    rank: Values | None = None

    def may_be(self, truth: bool) -> Any:
        """For which threads a condition can be true, or false."""
        return ~self.known | ((self.data != 0) == truth)


class Place(NamedTuple):
    """A barrier instruction and the threads that can reach it, [CTA, thread]."""

    name: str
    operands: list[Values]
    reached: Any


def check(module: Any, absent: Mapping[int, Collection[int]]) -> None:
    """Raise `BarrierError` if a barrier of a kernel in a traced module has a wrong count."""
    for kernel in parse(module.operation.get_asm(print_generic_op_form=True)):
        trace = Trace(kernel)
        for problem in problems(trace, absent):
            raise BarrierError(f"{trace.name}: {problem}")


def problems(trace: Trace, absent: Mapping[int, Collection[int]]) -> Iterator[str]:
    """What is wrong with the barriers of a kernel."""
    yield from _mbarriers(trace)
    yield from _named_barriers(trace, absent)
    yield from _of_all(trace)


def parse(text: str) -> list[Operation]:
    """The kernels of a module in MLIR's generic form."""
    results: dict[str, Operation] = {}
    stack, kernels = [Operation("", [], "", [[]])], []
    for line in map(str.strip, text.splitlines()):
        if line == "}, {":
            stack[-1].regions.append([])
        elif line.startswith("})"):
            stack.pop().text += line
        elif match := _OPERATION.match(line):
            uses = [use.partition("#") for use in re.findall(r"%[\w#]+", match[3])]
            operands = [(results[use], int(index or 0)) if use in results else None for use, _, index in uses]
            op = Operation(match[2], operands, line)
            stack[-1].regions[-1].append(op)
            if match[1]:
                results[match[1]] = op
            if line.endswith("({"):
                op.regions.append([])
                stack.append(op)
            if op.name == "cuda.kernel":
                kernels.append(op)
    return kernels


class Trace:
    """The barriers of a kernel, and which threads of a cluster can reach them."""

    def __init__(self, kernel: Operation) -> None:
        self.name = re.findall(r'sym_name = "(\w+)"', kernel.text)[0]
        sizes = re.findall(r"exact_(block|cluster)_dim = array<i64: (\d+), (\d+), (\d+)>", kernel.text)
        dims = {which: [int(n) for n in size] for which, *size in sizes}
        if dims["block"][1:] != [1, 1]:
            raise BarrierError(
                f"{self.name}: blocks must have one dimension for checks of barriers, got {dims['block']}"
            )
        self.shape = (int(np.prod(dims.get("cluster", 1))), dims["block"][0])
        cta, thread = np.indices(self.shape)
        self.own = self._known(cta)
        self.unknown = Values(0 * thread, np.zeros(self.shape, bool))
        self.special = {
            "nvvm.elect.sync": thread % WARP == 0,
            "nvvm.read.ptx.sreg.cluster.ctarank": cta,
            "nvvm.read.ptx.sreg.laneid": thread % WARP,
            "nvvm.read.ptx.sreg.tid.x": thread,
            "nvvm.read.ptx.sreg.tid.y": 0,
            "nvvm.read.ptx.sreg.tid.z": 0,
            "nvvm.read.ptx.sreg.ntid.x": self.shape[1],
            "nvvm.read.ptx.sreg.ntid.y": 1,
        }
        # name, first address and end of each field of shared memory
        self.fields: list[tuple[str, int, int]] = []
        self.places: list[Place] = []
        self._walk(kernel, np.ones(self.shape, bool))

    def _walk(self, op: Operation, reached: Any) -> None:
        inside = [reached] * len(op.regions)
        if op.name == "scf.if":
            condition = self._value(op.operands[0])
            inside = [reached & condition.may_be(True), reached & condition.may_be(False)]
        for region, threads in zip(op.regions, inside):
            for inner in region:
                self._walk(inner, threads)
        operands = [self._value(operand) for operand in op.operands]
        if _BARRIER.match(op.name):
            self.places.append(Place(op.name.removeprefix("nvvm."), operands, reached))
        elif op.name in ("nvvm.inline_ptx", "llvm.inline_asm") and _BARRIER_IN_PTX.search(op.text):
            raise BarrierError(f"{self.name}: barriers in inline PTX cannot be checked, got {op.text}")
        op.values = self._evaluate(op, operands)

    def _value(self, result: tuple[Operation, int] | None) -> Values:
        values = result[0].values if result else []
        return values[result[1]] if result and result[1] < len(values) else self.unknown

    def _known(self, data: Any) -> Values:
        return Values(np.broadcast_to(np.asarray(data, int), self.shape), np.ones(self.shape, bool))

    def _evaluate(self, op: Operation, operands: list[Values]) -> list[Values]:
        """The results of an operation; none if they are unknown."""
        name = op.name
        if name in self.special:
            return [self._known(self.special[name])]
        if constant := _CONSTANT.search(op.text):
            return [self._known({"true": 1, "false": 0}.get(constant[1], constant[1]))]
        if name in _BINARY or name == "arith.cmpi":
            number = re.search(r"predicate = (\d+)", op.text)
            function = _COMPARE[int(number[1])] if number else _BINARY[name]
            first, second = operands
            known = first.known & second.known
            if name == "arith.andi":
                # false and unknown is false
                known |= ~first.may_be(True) | ~second.may_be(True)
            return [Values(function(first.data, second.data).astype(int), known)]
        if name == "arith.select":
            return [self._choose(*operands)]
        if name == "scf.if" and op.regions[1]:
            ends = zip(*(region[-1].operands for region in op.regions))
            return [self._choose(operands[0], *map(self._value, end)) for end in ends]
        if name == "cute_nvgpu.arch.make_warp_uniform":
            leaders = np.arange(self.shape[1]) // WARP * WARP
            return [Values(operands[0].data[:, leaders], operands[0].known[:, leaders])]
        if name == "cute.memref.alloca" and "smem" in op.text:
            # allocations are far apart
            base = len(self.fields) << 32
            for member, size, at in re.findall(r'"(\w+):(\d+):(\d+)"', op.text):
                self.fields.append((member, base + int(at), base + int(at) + int(size)))
            return [self._known(base)]
        if name == "cute.add_offset":
            # of an unknown stage the first one
            start, count = operands
            bits = re.search(r"!cute\.ptr<[a-z]+(\d+),", op.text)
            step = count.data * count.known * (int(bits[1]) // 8 if bits else 0)
            return [Values(start.data + step, start.known & count.known)]
        if name == "nvvm.mapa":
            return [operands[0]._replace(rank=operands[1])]
        if name == "cute.get_hier_coord":
            return self._coordinates(operands[0], op.text)
        if name == "cute.get_leaves":
            return op.operands[0][0].values if op.operands[0] else []
        return operands if name in _SAME and len(operands) == 1 else []

    def _choose(self, condition: Values, first: Values, second: Values) -> Values:
        data = np.where(condition.data != 0, first.data, second.data)
        known = np.where(condition.data != 0, first.known, second.known)
        same = first.known & second.known & (first.data == second.data)
        return Values(data, (condition.known & known) | same)

    def _coordinates(self, index: Values, text: str) -> list[Values]:
        """Coordinates in a layout of a flat shape, of which the first runs fastest."""
        shape = re.search(r'!cute\.layout<"\(([\d,]+)\):', text)
        coordinates, rest = [], index.data
        for size in map(int, shape[1].split(",") if shape else ()):
            coordinates.append(Values(rest % size, index.known))
            rest = rest // size
        return coordinates

    def field_of(self, address: int) -> tuple[str, int, int]:
        return next(found for found in self.fields if found[1] <= address < found[2])


def _count(values: Values) -> int | None:
    """A number that is the same for all threads."""
    return int(values.data.flat[0]) if values.known.all() and np.ptp(values.data) == 0 else None


def _mbarriers(trace: Trace) -> Iterator[str]:
    counts: dict[int, int | None] = {}
    initialised: dict[int, Any] = defaultdict(lambda: np.zeros(trace.shape[0], int))
    arrived: dict[int, dict[str, Any]] = defaultdict(dict)
    reached: dict[int, Any] = defaultdict(bool)
    places = [place for place in trace.places if "mbarrier" in place.name]
    for place in places:
        if place.name == "mbarrier.init":
            for here in np.unique(place.operands[0].data[place.reached]):
                counts[here] = _count(place.operands[1])
                initialised[here] += (place.reached & (place.operands[0].data == here)).sum(axis=1)
    used = [place for place in places if place.name != "mbarrier.init"]
    starts = {int(here) for place in used for here in np.unique(place.operands[0].data[~place.operands[0].known])}
    for place in used:
        for here, threads in _arrivals(trace, place, counts, starts):
            reached[here] = reached[here] | threads.any(axis=(1, 2))
            # who waits does not arrive
            arrives = threads & ("arrive" in place.name)
            arrived[here][place.name] = arrived[here].get(place.name, False) | arrives
    for here in sorted(arrived):
        name, start, end = trace.field_of(here)
        name = f"mbarrier {name}[{(here - start) // MBARRIER_BYTES}]" if end - start > MBARRIER_BYTES else name
        if (initialised[here] != 1).any():
            yield f"{name} must be initialised by one thread, got {initialised[here].max()}"
        for cta in range(trace.shape[0]):
            who = {kind: threads[cta] for kind, threads in arrived[here].items() if threads[cta].any()}
            expected = sum(int(threads.sum()) for threads in who.values())
            # a CTA may leave a barrier alone
            if reached[here][cta] and counts.get(here) != expected:
                said = ", ".join(f"{_who(threads)} by {kind}" for kind, threads in who.items()) or "nobody"
                yield f"{name} must expect {expected} arrivals, got {counts.get(here)}; who arrives: {said}"


def _arrivals(trace: Trace, place: Place, counts: dict[int, int | None], starts: set[int]) -> Iterator[tuple[int, Any]]:
    """Each mbarrier that a place uses, and by which threads: [CTA of the mbarrier, CTA, thread]."""
    at = place.operands[0]
    rank = trace.own if at.rank is None else at.rank
    mine = rank.data == np.arange(trace.shape[0])[:, None, None]
    threads = (mine | ~rank.known) & place.reached
    for here in map(int, np.unique(at.data[place.reached])):
        yield here, threads & (at.data == here)
        if not at.known[place.reached].all():
            # one of the stages from there on, and of no others that begin later
            end = min([start for start in starts if start > here] + [trace.field_of(here)[2]])
            for other in [other for other in counts if here < other < end]:
                yield other, threads & (at.data == here)


def _named_barriers(trace: Trace, absent: Mapping[int, Collection[int]]) -> Iterator[str]:
    counts: dict[int, set[int | None]] = defaultdict(set)
    reached: dict[int, Any] = defaultdict(lambda: np.zeros(trace.shape, bool))
    for place in trace.places:
        if place.name in ("barrier", "barrier.arrive") and place.operands:
            index, number = place.operands
            for here in map(int, np.unique(index.data[place.reached])):
                counts[here].add(_count(number))
                away = np.isin(np.arange(trace.shape[1]) // WARP, list(absent.get(here, ())))
                reached[here] |= place.reached & (index.data == here) & ~away
    for here, threads in sorted(reached.items()):
        if not 0 < here < NAMED_BARRIERS:
            yield f"the index of a named barrier must be 1 to {NAMED_BARRIERS - 1}, got {here}"
        for cta in range(trace.shape[0]):
            if counts[here] != {int(threads[cta].sum())} or not _whole_warps(threads):
                got = " and ".join(map(str, counts[here]))
                yield f"named barrier {here} must be for {_who(threads[cta])}, whole warps, got {got}"


def _of_all(trace: Trace) -> Iterator[str]:
    """Barriers of all threads, and of whole warps."""
    together: dict[str, Any] = defaultdict(lambda: np.zeros(trace.shape, bool))
    for place in trace.places:
        if place.name == "barrier" and not place.operands and not place.reached.all():
            together["sync_threads"] |= place.reached
        if place.name.startswith("cluster"):
            together["cluster_wait" if "wait" in place.name else "cluster_arrive"] |= place.reached
        if place.name == "bar.warp.sync" and not _whole_warps(place.reached):
            yield f"sync_warp must be reached by whole warps, got {_who(place.reached)}"
    for name, threads in together.items():
        for cta in range(trace.shape[0]):
            if not threads[cta].all():
                yield f"{name} must be reached by all {trace.shape[1]} threads, got {_who(threads[cta])}"


def _whole_warps(threads: Any) -> bool:
    warps = threads.reshape(-1, WARP)
    return bool((warps.all(axis=1) == warps.any(axis=1)).all())


def _who(threads: Any) -> str:
    """How many threads, and of which warps."""
    warps = sorted({int(thread) // WARP for thread in threads.nonzero()[-1]})
    return f"{int(threads.sum())} threads of warps {', '.join(map(str, warps))}"
