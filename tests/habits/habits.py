"""Columns of the table: what every entry point does. A habit is a function of an entry, and raises AssertionError."""

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import twell
from tests.habits import derivatives
from tests.habits.calls import Operators, close, floating, gradients, results, rows, same, tokens_of
from tests.habits.entries import LAYOUTS, SMALLER, Call, Entry
from twell import PackedTwell
from twell.nn.layers import SparseFFN
from twell.testing import captured

BF16 = torch.bfloat16


def compiled(entry: Entry) -> None:
    """One graph for any number of tokens, with the bits of eager, in training too; a setting that changes is seen."""
    call, graphs = entry.call(), list[str]()

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph.code)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    graph = torch.compile(call.run, backend=backend, fullgraph=True)
    with torch.no_grad():
        for m in (24, 9, 17):
            part = rows(call.given, m)
            same(graph(**part), call(**part))
    assert len(graphs) <= 2 or "compiled: one graph" in entry.absent
    if "backward" not in entry.absent:
        for m in (24, 9):
            part = rows(call.given, m)
            for ours, eager in zip(gradients(call, graph, **part), gradients(call, **part), strict=True):
                close(ours, eager)
    if isinstance(call.run, SparseFFN):
        assert "twell" in graphs[0]
        call.run.strategy = "dense"
        with torch.no_grad():
            same(graph(**call.given), call())
        assert "twell" not in graphs[-1]
        for threshold in (0.5, 0.0, 0.125) if call.run.threshold else ():
            call.run.threshold = threshold
            with torch.no_grad():
                same(graph(**call.given), call())


class Holder(nn.Module):
    """A module with the operands of a call, but those of tokens."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.run = call.run
        self.others = {a: t for a, t in call.given.items() if a not in tokens_of(call.given)}

    def forward(self, given: dict[str, Tensor]) -> Any:
        return self.run(**given, **self.others)


@torch.no_grad()
def exported(entry: Entry) -> None:
    """One exported program, saved and loaded or decomposed, has the bits of eager for any number of tokens."""
    call = entry.call()
    given, least = tokens_of(call.given), 0 if "exported: no tokens" not in entry.absent else 1
    sizes = ({a: {0: Dim("m", min=least, max=4096)} for a in given},)
    file, programs = io.BytesIO(), []
    for strict in (False, True):
        programs.append(torch.export.export(Holder(call), (given,), dynamic_shapes=sizes, strict=strict))
    torch.export.save(programs[0], file)
    loaded = torch.export.load(io.BytesIO(file.getvalue())).module()
    for program in (loaded, programs[1].run_decompositions().module()):
        for m in (24, 1, 9, least):
            same(program(rows(given, m)), call(**rows(given, m)))


def saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def refilled(module: nn.Module) -> nn.Module:
    """A copy without values that safetensors has filled again."""
    from safetensors.torch import load_file, load_model, save_file, save_model

    other = copy.deepcopy(module)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "a.safetensors"
        save_file({a: t.contiguous().clone() for a, t in module.state_dict().items()}, file)
        other.load_state_dict({a: torch.ones_like(t) for a, t in module.state_dict().items()})
        other.load_state_dict(load_file(file))
        save_model(other, str(file))
        load_model(other, str(file))
    return other


def assigned(module: nn.Module) -> nn.Module:
    """A copy on meta that takes its state over."""
    state = {a: t.clone() for a, t in module.state_dict().items()}
    other = copy.deepcopy(module).to("meta")
    other.load_state_dict(state, assign=True)
    return other


def flattened(module: nn.Module) -> nn.Module:
    """A copy whose parameters are views of one buffer, which are then written past autograd."""
    other = copy.deepcopy(module)
    parameters = list(other.parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    for p, part in zip(parameters, buffer.split([p.numel() for p in parameters])):
        value, p.data = p.data, part.as_strided(p.shape, p.stride())
        p.data.copy_(value)
    return other


def recast(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).double().to(BF16)


def pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def shared(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).share_memory()


def replaced(module: nn.Module) -> nn.Module:
    """A copy with parameters that were put in past ``nn.Module.__setattr__``, as accelerate does."""
    other = copy.deepcopy(module)
    for owner in other.modules():
        for name, p in owner._parameters.items():
            if p is not None:
                owner._parameters[name] = nn.Parameter(p.detach().clone(), p.requires_grad)
    return other


def swapped(module: nn.Module) -> nn.Module:
    """A copy whose parameters torch swaps for those of a state."""
    other = copy.deepcopy(module)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        other.load_state_dict({a: t.clone() for a, t in module.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return other


COPIES = (copy.deepcopy, pickled, saved, refilled, assigned, flattened, shared, recast, replaced, swapped)


def copies(entry: Entry) -> None:
    """Copies, pickles, files, casts and flat parameters keep bits, settings and layout, and share nothing."""
    call = entry.call()
    call.run.eval()
    for layout in ("rows", "auto"):
        if "copies: rows" not in entry.absent:
            twell.nn.set_down_layout(call.run, layout)  # type: ignore[arg-type]
        copied(entry, call)


def copied(entry: Entry, call: Call) -> None:
    expected = results(call())
    keys, before = list(call.run.state_dict()), [p.detach().clone() for p in call.run.parameters()]
    for through in COPIES:
        if f"copies: {through.__name__}" in entry.absent:
            continue
        twin = through(call.run)
        assert list(twin.state_dict()) == keys
        assert twin.training is False
        same(twin(**call.given), expected, through.__name__)
        for p, own in zip(twin.parameters(), call.run.parameters(), strict=True):
            assert (p.stride(), p.requires_grad, type(p)) == (own.stride(), own.requires_grad, type(own))
        for p in twin.parameters():
            p.data.zero_()
    assert all(map(torch.equal, call.run.parameters(), before))
    # settings and recordings are no part of a state
    for layer in (m for m in call.run.modules() if isinstance(m, SparseFFN)):
        layer.record_aux, layer.compression, layer.strategy = True, 4, "row"
        call()
        assert layer.aux is not None
        for twin in (copy.deepcopy(layer), pickled(layer)):
            assert twin.aux is None
            for name in (
                "record_aux",
                "compression",
                "strategy",
                "activation",
                "threshold",
                "down_layout",
                "invariant",
            ):
                assert getattr(twin, name) == getattr(layer, name)
        layer.record_aux, layer.compression, layer.strategy = False, 8, entry.strategy


def repeats(entry: Entry) -> None:
    """A second call and eight threads have the bits of the first, whose result has been spoilt."""
    call = entry.call()
    with torch.no_grad():
        first = results(call())
        kept = [t.clone() for t in first]
        for t in first:
            t.view(-1).view(torch.uint8).fill_(255)
        same(call(), kept)
    trains = "backward" not in entry.absent
    kept_gradients = gradients(call) if trains else []

    def run(number: int) -> None:
        # each thread has a mode of its own
        if trains and number % 2:
            same(gradients(call), kept_gradients)
        else:
            with torch.no_grad():
                same(call(), kept)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, range(8)))


def owned(entry: Entry) -> None:
    """y is no view: FSDP2 puts hooks on outputs, and a hook on a view does not survive a change in place."""
    for strategy in (entry.strategy, "dense", "auto"):
        call = entry.call(strategy)
        for lead in ((24,), (3, 8), (2, 3, 4)):
            given = {a: t.unflatten(0, lead) for a, t in tokens_of(call.given).items()}
            for y in (call(**given), *([] if "backward" in entry.absent else gradients(call, **given)[:1])):
                assert not y._is_view()
                expected = y.detach() + 1
                y += 1
                same(y, expected)


def strides(entry: Entry) -> None:
    """Wherever an operand lies, results have the same bits, gradients too; leading dimensions are kept."""
    call = entry.call()
    trains = "backward" not in entry.absent
    for name in floating(call.given):
        for kind, layout in (LAYOUTS | SMALLER).items():
            odd = layout(call.given[name])
            plain = odd.resolve_neg().contiguous() + 0 if kind in SMALLER else call.given[name]
            with torch.no_grad():
                same(call(**{name: odd}), call(**{name: plain}), f"{name}, {kind}")
                # a class that only marks a weight does not make a call dense
                with Operators() as seen:
                    call(**{name: odd})
                assert seen.calls or "zeros" in kind
            if trains and "inference" not in kind and "zeros" not in kind:
                ours, theirs = gradients(call, **{name: odd}), gradients(call, **{name: plain})
                same(ours[1:], theirs[1:], f"gradients with {name}, {kind}")
    with torch.no_grad():
        flat = call()
        for lead in ((2, 3, 4), (1, 24)) if "input" not in call.given else ((2, 12),):
            shaped = {a: t.unflatten(0, lead) for a, t in tokens_of(call.given).items()}
            y = call(**shaped)
            y, right = (y.unpack(), flat.unpack()) if isinstance(y, PackedTwell) else (y, flat)
            (y, *figures), (right, *others) = results(y), results(right)
            assert y.shape[:-1] == lead
            assert y.is_contiguous()
            same((y.flatten(0, -2), *figures), (right, *others))
        if "input" not in call.given:
            y = call(**{a: t[3] for a, t in tokens_of(call.given).items()})
            assert isinstance(y, (tuple, PackedTwell)) or torch.equal(y, flat[3])
    if trains:
        dx = gradients(call)[1]
        led = gradients(call, **{a: t.view(*lead, -1) for a, t in tokens_of(call.given).items()})
        same(led[1].flatten(0, -2), dx)


def memory(entry: Entry) -> None:
    """Nothing that a call made or was given outlives what the caller holds."""
    kept: list[weakref.ref[Any]] = []

    def run() -> None:
        call = entry.call()
        with torch.no_grad():
            found = results(call())
        if "backward" not in entry.absent:
            found += gradients(call)
        held = [call.run] if call.is_module else []
        held += [*found, *(t for t in call.given.values() if isinstance(t, Tensor)), *call.leaves()]
        kept.extend(weakref.ref(each) for each in held)

    run()
    gc.collect()
    assert kept
    assert not [ref() for ref in kept if ref() is not None]


@contextmanager
def default_device(where: str) -> Iterator[None]:
    torch.set_default_device(where)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def surroundings(entry: Entry) -> None:
    """Inference mode, other defaults, deterministic algorithms change no bit; inference in float32 is dense."""
    call = entry.call()
    with torch.no_grad():
        expected = results(call())
    defaults = torch.device("meta"), default_device("meta"), default_dtype(torch.bfloat16)
    for context in (torch.inference_mode(), deterministic(), *defaults):
        with torch.no_grad(), context:
            found = results(call())
        assert all(t.device.type == "cpu" for t in found)
        same(found, expected, type(context).__name__)
    if "surroundings: wider" not in entry.absent:
        for dtype in (torch.float32, torch.float64):
            wide, dense = entry.call(), entry.call("dense")
            for each in (wide, dense):
                if each.is_module:
                    each.run.to(dtype)
                each.given |= {a: each.given[a].to(dtype) for a in floating(each.given)}
            with torch.no_grad():
                same(wide(), dense())
    if "backward" not in entry.absent:
        plain = gradients(call)
        for context in (deterministic(), default_device("meta"), default_dtype(torch.bfloat16)):
            with context:
                same(gradients(call), plain)


def opcheck(entry: Entry) -> None:
    """torch's checks of every operator that a call reaches, in training too."""
    call, seen = entry.call(), Operators()
    with torch.no_grad(), seen:
        call()
    if "backward" not in entry.absent:
        with seen:
            gradients(call)
    assert seen.calls
    for op, args, kwargs in {(op, len(args)): (op, args, kwargs) for op, args, kwargs in seen.calls}.values():
        # another check multiplies the operands, which torch cannot do in e4m3
        some = {"test_utils": ("test_faketensor", "test_aot_dispatch_dynamic")} if "scales" in entry.line else {}
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        torch.library.opcheck(op, args, kwargs, **some)


def explain(entry: Entry) -> None:
    """``explain`` names the strategy whose operator runs."""
    for strategy in ("row", "union", "dense", "auto"):
        call, seen = entry.call(strategy), Operators()
        call.run.eval()
        with torch.no_grad(), seen:
            call()
        ran = {a for _, args, _ in seen.calls for a in args if a in ("row", "union")} or {"dense"}
        told = {row.strategy for row in twell.explain(call.run)}
        assert ran <= told or strategy == "auto", (strategy, ran, told)
        assert ran == {"dense"} or strategy in ("row", "union")


def empty(entry: Entry) -> None:
    """No tokens: right shapes, no gradient but zeros."""
    call = entry.call()
    for lead in ((0,), (2, 0, 3)):
        if "input" in call.given and len(lead) == 3:
            continue
        given = {a: t[:0].view(*lead, t.shape[-1]) for a, t in tokens_of(call.given).items()}
        with torch.no_grad():
            y = call(**given)
        y, *figures = [y] if isinstance(y, PackedTwell) else results(y)
        assert y.shape[:-1] == lead
        assert not any(t.any() for t in figures)
        if "backward" not in entry.absent:
            assert not any(g.any() for g in gradients(call, **given))


@torch.no_grad()
def capture(entry: Entry) -> None:
    """On a GPU: a captured call follows its inputs; nothing waits for the host, and a late x is in time."""
    call = entry.call(device="cuda")
    inputs = {a: t.clone() for a, t in tokens_of(call.given).items()}
    graph, found = captured(lambda: results(call(**inputs)))
    other = {a: t.roll(5, 0) for a, t in tokens_of(call.given).items()}
    for given in (tokens_of(call.given), other, tokens_of(call.given)):
        expected = results(call(**given))
        for name, t in given.items():
            inputs[name].copy_(t)
        graph.replay()
        same(found, expected)
    torch.cuda.set_sync_debug_mode("error")
    try:
        late = results(call(**other))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side, inputs = torch.cuda.Stream(), {a: torch.zeros_like(t) for a, t in other.items()}  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        for name, t in other.items():
            inputs[name].copy_(t)
        on_side = results(call(**inputs))
    torch.cuda.current_stream().wait_stream(side)
    same(on_side, late)


# what a GPU alone shows
ON_GPU = {"capture": capture}
HABITS = {
    habit.__name__: habit
    for habit in (
        *(compiled, exported, copies, repeats, owned, strides, memory, surroundings, opcheck, explain, empty),
        *(derivatives.transforms, derivatives.overrides, derivatives.autocast, derivatives.backward, derivatives.mains),
    )
}
