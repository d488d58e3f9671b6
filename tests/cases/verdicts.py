"""Whether a call computes what its case asks for: bits of integers, bounds of real numbers, the same bits again.

What a call returns is filled with NaN before it is called again, which must give the same bits and, on a GPU, not wait
for it; so must a CUDA graph, which then gets other tokens. On a GPU free memory holds NaN.
"""

import contextlib
import dataclasses
import math
import time
import traceback
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests import family
from tests.cases.formats import judge_format
from tests.cases.judged import Mismatch, Result, difference, judge_elements, judge_reals
from tests.cases.layouts import laid_out, surroundings
from twell.ops.float8 import Float8
from twell.testing import bits, comparison
from twell.testing.bounds import solve
from twell.testing.calls import Outputs, caller, dense
from twell.testing.case import Case
from twell.testing.exact import EXACT_LIMIT
from twell.testing.formula import answers, roundings
from twell.testing.operands import Operands, build, rounds_weighted

POISON = 0xFF
Run = Callable[[Case, torch.device, Result], None]


def verdict(case: Case, device: torch.device | str = "cpu") -> str:
    """ "ok", or what is wrong with a case on a device."""
    return attempt(case, torch.device(device)).verdict


def attempt(case: Case, device: torch.device, run: Run | None = None) -> Result:
    """The result of a case, or of another run of it; any exception of a legal call is a mismatch, too."""
    result, start = Result(), time.perf_counter()
    try:
        (run or run_twice)(case, device, result)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except Mismatch as error:
        result.verdict = str(error)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        result.verdict = (
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]} ({at.name}, {at.filename}:{at.lineno})"
        )
    result.seconds = time.perf_counter() - start
    return result


def asks_nothing(case: Case, result: Result) -> bool:
    """Whether a case that is right has no non-zero, without saying so by its pattern."""
    sparse = case.m > 0 and case.is_sparse and case.pattern != "none" and case.kind != "experts"
    return result.verdict == "ok" and sparse and not result.nonzeros


def run_twice(case: Case, device: torch.device, result: Result) -> None:
    """Run a case; raise Mismatch, or the call's own exception, if it fails."""
    o = build(case, device)
    operands = laid_out(case, o)
    keep = tensors(o) + tensors(operands)
    poison(device)
    with surroundings(case, device):
        call = caller(case, operands)
        first = run_on_side_stream(call, operands) if case.call == "stream" else call()
        outputs = {name: t.clone() for name, t in first.items()}
        spoil(first, keep)
        # in every second case the next call gets this memory; in the others it must not touch it
        held = first if case.seed % 2 else {}
        del first
        with contextlib.nullcontext() if waits(case, device) else no_waits(device):
            again = call()
        if not chooses_anew(case):
            same_bits(again, outputs, "a second call")
        if not spoilt(held, keep):
            raise Mismatch("a second call writes to what the first returned")
        del again, held
    judge(case, o, operands, outputs, result)
    if case.call == "graph" and case.m and not waits(case, device):
        replayed(case, call, o, operands, outputs, result)
    elif case.strategy == "row+invariant" and case.m > 1 and device.type == "cuda":
        # products on a CPU have other bits for other numbers of rows
        without_others(case, o, outputs)


def chooses_anew(case: Case) -> bool:
    """Whether a call may choose another strategy than the one before: sites measure, and modules and pairs have one."""
    return case.strategy == "site" or (case.strategy == "auto" and (case.module or case.kind == "pair"))


def replayed(
    case: Case, call: Callable[[], Outputs], o: Operands, operands: Operands, outputs: Outputs, result: Result
) -> None:
    """Check a CUDA graph of the call, with its own tokens and with others."""
    device, keep = o["dy"].device, tensors(o) + tensors(operands)
    with surroundings(case, device):
        graph, static = bits.captured(call)
        spoil(static, keep)
        graph.replay()
        # "auto" weighs the host's time in eager calls alone
        if case.strategy not in ("auto", "site"):
            same_bits(static, outputs, "a graph")
    others = build(case, device, again=1)
    for name in ("x", "gate", "expert_ids", "weights", "dy"):
        if name not in o:
            continue
        laid = laid_out(case, others)[name]
        for own, new in zip(tensors({name: operands[name]}), tensors({name: laid})):
            own.copy_(new)
    spoil(static, keep)
    graph.replay()
    try:
        judge(case, others, operands, {name: t.clone() for name, t in static.items()}, result)
    except Mismatch as error:
        raise Mismatch(f"a graph with other tokens: {error}") from None


def without_others(case: Case, o: Operands, outputs: Outputs) -> None:
    """Raise Mismatch if a token's bits depend on the others."""
    part = dict(o)
    for name in o.keys() & {"x", "expert_ids", "weights", "dy"}:
        t = o[name]
        part[name] = Float8(t.values[::3], t.scale[::3].contiguous()) if isinstance(t, Float8) else t[::3]
    fewer = case.replace(m=len(part["dy"]), lead=0, x_layout="plain")
    y = outputs["y"].view(case.m, -1)[::3]
    with surroundings(case, y.device):
        ours = caller(fewer, laid_out(fewer, part))()["y"]
    if not torch.equal(ours.nan_to_num(), y.nan_to_num()):
        raise Mismatch("other tokens change the bits of some")


def waits(case: Case, device: torch.device) -> bool:
    if case.kind != "experts" or case.strategy == "row":
        return False
    scaled = case.scales != "" and (case.n % 16 > 0 or family.is_portable(device))
    return case.dtype == "fp16" or case.experts == 1024 or scaled


@contextlib.contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """What would make the host wait for a GPU raises; a first call may, as it loads kernels."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


# Memory


def poison(device: torch.device) -> None:
    """Leave NaN in the free memory that torch holds and hands out next."""
    if device.type == "cuda":
        sizes = [1 << count for count in range(9, 21)] * 3 + [1 << count for count in range(21, 27)]
        blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        for block in blocks:
            block.fill_(POISON)


def tensors(operands: Operands) -> list[Tensor]:
    return [t for operand in operands.values() for t in (operand if isinstance(operand, Float8) else (operand,))]


def storages(outputs: Outputs, keep: list[Tensor]) -> list[Tensor]:
    """The bytes behind outputs, except for those shared with ``keep``."""
    kept = {t.untyped_storage().data_ptr() for t in keep}
    own = [t.untyped_storage() for t in outputs.values()]
    return [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in own if s.data_ptr() not in kept]


def spoil(outputs: Outputs, keep: list[Tensor]) -> None:
    """Fill the storage of outputs with NaN, except for the part shared with ``keep``."""
    for content in storages(outputs, keep):
        content.fill_(POISON)


def spoilt(outputs: Outputs, keep: list[Tensor]) -> bool:
    """Whether they are as ``spoil`` left them."""
    return all(bool((content == POISON).all()) for content in storages(outputs, keep))


def run_on_side_stream(call: Callable[[], Outputs], operands: Operands) -> Outputs:
    """Make the call on its own stream, which writes tokens only after a delay."""
    late = operands["x"] if "x" in operands else operands["gate"]
    x = late.scale if isinstance(late, Float8) else late
    right = x.detach().clone()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            x.fill_(math.nan)
            torch.cuda._sleep(400_000)  # type: ignore[no-untyped-call]
            x.copy_(right)
            return call()
    finally:
        # a call that is refused leaves writes on the stream, to memory that the next case gets
        torch.cuda.current_stream().wait_stream(stream)


def same_bits(found: Outputs, first: Outputs, what: str) -> None:
    differing = [
        name
        for name, t in found.items()
        if t.shape != first[name].shape
        or not torch.equal(t.reshape(-1).view(torch.uint8), first[name].reshape(-1).view(torch.uint8))
    ]
    if differing or found.keys() != first.keys():
        raise Mismatch(f"{what} has other bits in {', '.join(differing) or sorted(found)}")


# Answers


def judge(case: Case, o: Operands, operands: Operands, found: Outputs, result: Result) -> None:
    """Raise Mismatch unless a call's outputs are within their bounds."""
    if case.kind in ("pack", "kept"):
        judge_format(case, o, found, result)
        return
    tokens = next(operands[name] for name in ("x", "gate") if name in operands)
    shape = (*tokens.shape[:-1], case.k)
    if found["y"].shape != shape or found["y"].dtype != case.torch_dtype:
        raise Mismatch(f"y must be {list(shape)}, got {found['y'].dtype} {list(found['y'].shape)}")
    missing = {"y", *case.wanted} - {name.removeprefix("main ") for name in found}
    if missing:
        raise Mismatch(f"no {', '.join(sorted(missing))}")
    for name in found.keys() & {*case.wanted}:
        if found[name].shape != operands[name].shape or found[name].dtype != operands[name].dtype:
            given = f"{operands[name].dtype} {list(operands[name].shape)}"
            raise Mismatch(f"{name} must be {given}, got {found[name].dtype} {list(found[name].shape)}")
    if case.kind not in ("layer", "pair", "given") or case.scales or case.rank:
        judge_worst(case, o, found, result)
        return
    right = None if case.exact and case.is_sparse else solve(case, o)
    plain: Outputs = {}
    if not case.is_sparse:
        with torch.autocast(o["dy"].device.type, case.torch_dtype, enabled=case.autocast):
            plain = {name: t for name, t in dense(case, operands).items() if name in found}
        # depending on strides PyTorch may round a product before it adds the bias
        with contextlib.suppress(Mismatch):
            same_bits({name: found[name] for name in plain}, plain, "dense")
            return
        if case.strategy == "dense" and case.kind != "pair":
            same_bits({name: found[name] for name in plain}, plain, "dense")
    if case.exact:
        judge_integers(case, o, found, result)
        return
    assert right is not None
    result.nonzeros = float(right.nonzeros) / max(case.m, 1)
    if "l1" in found:
        judge_figures(case, found, right.l1, float(right.l1_bound), right.nonzeros)
    baseline: Outputs = {}
    if case.strategy != "dense":
        baseline = dense(case.replace(autocast=False), {name: _contiguous(name, t) for name, t in o.items()})
    for name, t in found.items():
        key = name.removeprefix("main ")
        if key in right.answers:
            # one that rounds before the bias may choose other gates
            same = None if case.top else plain.get(name)
            references = [r for r in (baseline.get(key), same) if r is not None]
            judge_reals(case, name, t, right.answers[key], references, result)


def _contiguous(name: str, t: Tensor) -> Tensor:
    """An operand with strides that dense PyTorch likes best."""
    return t if name != "w_down" else t.t().contiguous().t()


def judge_figures(case: Case, found: Outputs, l1: Tensor, off: float, l0: Tensor) -> None:
    """``l1``, ``l0``: sums over tokens, of which the figures are means as PyTorch divides them on their device."""
    if found["l1"].dim() or found["l0"].dim() or found["l0"].dtype != torch.float32:
        raise Mismatch(f"figures must be 0-d, and l0 float32, got {found['l1']} and {found['l0']}")
    tokens = max(case.m, 1)
    for name, total, most in (("l0", l0, 0.0), ("l1", l1, off / tokens)):
        whole = total.to(found[name].dtype)
        ours, expected = float(found[name]), float(whole / tokens)
        # a GPU multiplies by the reciprocal, which is rounded
        by_reciprocal = float(whole * (torch.ones_like(whole) / tokens))
        if not min(abs(ours - expected), abs(ours - by_reciprocal)) <= most:
            raise Mismatch(f"{name} {ours}, expected {expected}, off by at most {most}")


def judge_integers(case: Case, o: Operands, found: Outputs, result: Result) -> None:
    """Raise Mismatch unless each result is the formula's, rounded once."""
    right = answers(case, o)
    result.nonzeros = float(right["l0"].value)
    if "l1" in found:
        l1, l0 = (right[name].value * max(case.m, 1) for name in ("l1", "l0"))
        # what fp32 holds is exact in every order; means times tokens are whole
        off = 0.0 if float(l1) < EXACT_LIMIT else 1e-5 * float(l1)
        judge_figures(case, found, l1.round() if case.exact else l1, off, l0.round())
    for name, t in found.items():
        key = name.removeprefix("main ")
        # dense PyTorch adds two products to the gradient of x, each of them rounded
        if key in ("l1", "l0") or (not case.is_sparse and key == "x" and case.first == "gate"):
            continue
        # a main gradient is in fp32, and so is that of thresholds
        value, in_fp32 = right[key].value.reshape(t.shape), name != key or name == "threshold"
        expected = value.to(t.dtype) if in_fp32 else value.to(case.torch_dtype).to(t.dtype)
        if name == "moved":
            expected = t if abs(float(t) - float(value)) <= 1e-6 * abs(float(value)) else value.float()
        elif name == "unfired":
            expected = value
        if not torch.equal(t, expected):
            raise Mismatch(f"{name} {difference(t, expected)}")


def judge_worst(case: Case, o: Operands, found: Outputs, result: Result) -> None:
    """Integers by bits, and real numbers by the worst that roundings can do, and, without gradients, beside dense."""
    if case.exact and case.is_sparse:
        again = rounded_again(case, o["dy"].device)
        judge_integers(case, o, {name: t for name, t in found.items() if name not in again}, result)
        found = {name: t for name, t in found.items() if name in again}
        if not found:
            return
    right = answers(case, o)
    result.nonzeros = float(right["l0"].value)
    for name, t in found.items():
        answer = right[name.removeprefix("main ")]
        # under autocast a result of 16 bits is returned in float32
        dtype = t.dtype if name.startswith("main ") or name == "l1" else case.torch_dtype
        judge_elements(name, t, answer, result, roundings(case), dtype)
    if "y" in found and (case.scales or case.kind == "experts"):
        judge_beside_dense(case, o, found["y"], right["y"].value, result.nonzeros)


def rounded_again(case: Case, device: torch.device) -> set[str]:
    """What is added up of rounded parts, or rounded on its way through adapters."""
    if case.rank:
        return set(case.wanted)
    if case.shared:
        return set() if rounds_weighted(case, device) else {"y"}
    if case.kind != "autoencoder":
        return set()
    return {"b_down", *(["x"] if case.skip else [])} & set(case.wanted)


def judge_beside_dense(case: Case, o: Operands, y: Tensor, right: Tensor, nonzeros: float) -> None:
    """Raise Mismatch unless y is as close to float64 as dense products of each expert are."""
    if not y.numel() or not bool(right.to(y.dtype).isfinite().all()):
        return
    # a shared expert is one of all here; beside them, it is added to their sum, rounded
    usual = {"lead": 0, "x_layout": "plain", "down_layout": "rows", "autocast": False, "shared": False, "merged": False}
    plain = case.replace(strategy="dense", **usual)
    ours = comparison.errors(y.reshape(right.shape), right)
    theirs = comparison.errors(caller(plain, laid_out(plain, o))()["y"], right)
    if case.shared:
        once = comparison.errors(right.to(y.dtype), right)
        theirs = comparison.Errors(*map(math.hypot, dataclasses.astuple(theirs), dataclasses.astuple(once)))
    # of few hidden values, chance decides
    budget = 1.1 * comparison.allowance(min(nonzeros, case.m * case.slots / 16))
    close = ours.frobenius < 2**-6 if case.scales else theirs.frobenius < 2**-12 and ours.frobenius < 2**-8
    if not (close or ours.within(theirs, budget, 4 * budget)):
        raise Mismatch(f"y: error {ours}, dense {theirs}")
