"""What is refused, and the whole sentence that says so: the table is ``refusals.txt``, a section for each callable.

A line has changes of a right call, with "|" between several, and the error that each of them raises. Changes are
keyword arguments in Python, in which the right ones are known by their names; ``a/b=3`` changes one and then the other.
In the sentence {name}, {value} and {type} stand for the first changed argument, its value and its type.
"""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import twell
from tests.habits.derivatives import Doubled, Doubling
from tests.habits.entries import ENTRIES, Block, Fused
from tests.habits.habits import results, same
from twell import recipe, testing
from twell.choose.plan import Facts, routed
from twell.integrations import layouts
from twell.nn import distributed
from twell.nn.autoencoder import SparseAutoencoder
from twell.nn.float8 import Float8MLP
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.ops import float8, hybrid
from twell.ops.float8 import E4M3, Float8
from twell.testing.case import Case

BF16 = torch.bfloat16
K, N = 16, 72
Arguments = dict[str, Any]


def zeros(*shape: int, dtype: torch.dtype = BF16, **options: Any) -> Tensor:
    return torch.zeros(shape, dtype=dtype, **options)


def layer(**options: Any) -> SparseMLP:
    return SparseMLP(K, N, **{"dtype": BF16} | options)


def weights(*lead: int) -> list[Float8]:
    return [twell.quantize(torch.ones(*lead, *shape)) for shape in ((N, K), (N, K), (K, N))]


def setting(make: Callable[[], Any]) -> Callable[..., None]:
    """Set attributes of a module, which keep their values if that is refused."""

    def put(**values: Any) -> None:
        module = make()
        for name, value in values.items():
            before, children = getattr(module, name), len(list(module.modules()))
            try:
                setattr(module, name, value)
            except Exception:
                assert getattr(module, name) == before
                assert len(list(module.modules())) == children
                raise

    return put


def recorded(**how: Any) -> nn.Module:
    """A model of a layer whose figures are recorded and called once."""
    model = nn.Sequential(layer(dtype=torch.float32, strategy="union"))
    recipe.record_aux(model, **how)
    model(torch.randn(2, 3, K))
    return model


def doing(change: Callable[[Any], object], cls: Any = SparseMLP) -> Any:
    made = cls(K, N, dtype=BF16)
    change(made)
    return made


def tracked(**arguments: Any) -> Any:
    tracker = recipe.SparsityTracker(layer())
    with tracker.watch(**arguments):
        return tracker


def mains(**given: Any) -> Any:
    """A layer whose weights have these as ``main_grad``."""
    made = layer()
    made.accumulate_main_grad = True
    for child, main in given.items():
        getattr(made, child).weight.main_grad = main
    return made(zeros(3, K))


def operator(name: str) -> Callable[..., Any]:
    return lambda **given: getattr(torch.ops.twell, name)(**given)


def operands(*names: str, **others: Any) -> Callable[[], Arguments]:
    """Operands of a layer by name, as operators have them: weights by rows of neurons."""
    shapes = {"x": (9, K), "w_gate": (N, K), "w_up": (N, K), "w_down": (N, K), "gate": (9, N)}
    return lambda: {name: torch.ones(shapes[name], dtype=BF16) if name in shapes else None for name in names} | others


def packed() -> Arguments:
    words, spill, _ = twell.ops.gate_pack(torch.ones(9, K).to(BF16), torch.ones(N, K).to(BF16), None, 8)
    return {"words": words, "spill": spill, "compression": 8}


LAYER = ("x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")


def of_transformers(name: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        pytest.importorskip("transformers")
        import twell.integrations.transformers as module

        return getattr(module, name)(**arguments)

    return call


# Callables beside the entry points, and their right arguments; None: that call is not tried.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments] | None]] = {
    "settings of SparseGatedMLP": (setting(lambda: SparseGatedMLP(K, N, dtype=BF16)), dict),
    "settings of an invariant layer": (setting(lambda: layer(invariant=True)), dict),
    "settings of fatrelu": (setting(lambda: layer(activation="fatrelu", threshold=0.5)), dict),
    "SparseGatedMLP()": (SparseGatedMLP, lambda: {"hidden": K, "intermediate": N}),
    "SparseMLP()": (SparseMLP, lambda: {"hidden": K, "intermediate": N}),
    "SparseMLP.from_linear": (SparseMLP.from_linear, lambda: {"up": nn.Linear(K, N), "down": nn.Linear(N, K)}),
    "SparseGatedMLP.from_linear": (
        SparseGatedMLP.from_linear,
        lambda: {"gate": nn.Linear(K, N), "up": nn.Linear(K, N), "down": nn.Linear(N, K)},
    ),
    "SparseAutoencoder()": (SparseAutoencoder, lambda: {"d_in": K, "d_sae": N}),
    "SparseAutoencoder.decode": (
        lambda **given: SparseAutoencoder(K, N).decode(**given),
        lambda: {"codes": torch.zeros(3, N)},
    ),
    "SparseAutoencoder.auxiliary_loss": (
        lambda **given: SparseAutoencoder(K, N).auxiliary_loss(**given),
        lambda: {"x": torch.ones(2, K), "y": torch.ones(2, K), "dead": torch.ones(N, dtype=torch.bool)},
    ),
    "Float8MLP()": (
        lambda **given: Float8MLP(*weights(), **given),
        lambda: {"input_scale": torch.tensor(0.25)},
    ),
    "settings of Float8MLP": (setting(lambda: Float8MLP(*weights())), dict),
    "quantize": (twell.quantize, lambda: {"weight": torch.ones(3, 3)}),
    "quantize_": (twell.quantize_, lambda: {"model": nn.Sequential(layer())}),
    "set_down_layout": (twell.nn.set_down_layout, lambda: {"module": layer(), "layout": "rows"}),
    "set_strategy": (twell.nn.set_strategy, lambda: {"module": layer(), "strategy": "row"}),
    "explain": (twell.explain, lambda: {"layers": layer()}),
    "AutoStrategy": (twell.AutoStrategy, dict),
    "compact": (twell.compact, lambda: {"module": layer(), "alive": torch.arange(N) > 7}),
    "analyze": (twell.analyze, lambda: {"model": nn.Sequential(layer()), "batches": [zeros(3, K)]}),
    "count_firing": (lambda model: twell.count_firing(model).__enter__(), lambda: {"model": layer()}),
    "sparsify_": (
        twell.sparsify_,
        lambda: {"model": nn.Sequential(Block(nn.Linear(K, N), nn.Linear(N, K))), "names": ("fc1", "fc2")},
    ),
    "transformers.sparsify": (of_transformers("sparsify"), None),
    "transformers.load": (of_transformers("load"), None),
    "SparsityCallback": (of_transformers("SparsityCallback"), dict),
    "recipe.layers": (recipe.layers, lambda: {"model": layer()}),
    "recipe.record_aux": (recipe.record_aux, lambda: {"model": layer()}),
    "recipe.clear_aux": (recipe.clear_aux, lambda: {"model": recorded()}),
    "recipe.l1_term": (recipe.l1_term, lambda: {"model": recorded()}),
    "recipe.l1_warmup": (recipe.l1_warmup, lambda: {"step": 0, "warmup_steps": 3}),
    "recipe.reinitialize_dead": (
        recipe.reinitialize_dead,
        lambda: {"module": layer(), "dead": torch.zeros(N, dtype=torch.bool), "step": 0},
    ),
    "recipe.trained_layers": (recipe.trained_layers, lambda: {"model": layer()}),
    "recipe.SparsityTracker": (recipe.SparsityTracker, lambda: {"model": layer()}),
    "SparsityTracker.watch": (tracked, None),
    "recipe.TargetSparsity": (recipe.TargetSparsity, lambda: {"nnz": 5, "steps": 10}),
    "recipe.TargetThreshold": (recipe.TargetThreshold, lambda: {"model": layer(), "nnz": 5, "steps": 10}),
    "distributed.tensor_parallel_plan": (distributed.tensor_parallel_plan, lambda: {"model": layer()}),
    "distributed.SparseMLPParallel": (distributed.SparseMLPParallel, dict),
    "testing.make": (testing.make, lambda: {"name": "topic29", "m": 4, "k": 16, "n": 256, "device": "cpu"}),
    "testing.integer_problem": (testing.integer_problem, lambda: {"m": 4, "k": 16, "n": 256}),
    "testing.errors": (testing.errors, lambda: {"out": torch.zeros(2, 3), "answer": torch.zeros(2, 3)}),
    "compact, a model": (
        twell.compact,
        lambda: {"module": nn.Sequential(layer(), nn.ModuleList([layer()])), "alive": {"0": torch.arange(N) > 7}},
    ),
    "float8.float8": (float8.float8, lambda: {"values": torch.ones(200, 300).to(E4M3), "scale": torch.ones(())}),
    "sparse_ffn, a threshold that trains": (
        twell.sparse_ffn,
        lambda: {
            "x": zeros(9, K), "w_up": zeros(N, K), "w_down": zeros(K, N), "activation": "fatrelu",
            "threshold": torch.ones(N, requires_grad=True), "bandwidth": 0.5,
        },
    ),
    "accumulate_main_grad": (mains, lambda: {"up_proj": torch.zeros(N, K), "down_proj": torch.zeros(K, N)}),
    "TargetSparsity.term": (
        lambda nnz, model, of="hidden": recipe.TargetSparsity(nnz, 10, of=of).term(model),
        lambda: {"nnz": 5, "model": recorded()},
    ),
    "TargetSparsity.load_state_dict": (
        lambda state: recipe.TargetSparsity(5, 10).load_state_dict(state),
        lambda: {"state": recipe.TargetSparsity(5, 10).state_dict()},
    ),
    "TargetThreshold.load_state_dict": (
        lambda state: recipe.TargetThreshold(layer(), 5, 10).load_state_dict(state),
        lambda: {"state": recipe.TargetThreshold(layer(), 5, 10).state_dict()},
    ),
    "ops.gate_pack": (operator("gate_pack"), operands("x", "w_gate", "b_gate", compression=8)),
    "ops.unpack": (operator("unpack"), lambda: packed() | {"n": N}),
    "ops.ffn": (operator("ffn"), operands(*LAYER, compression=8, strategy="row", site=None)),
    "ops.hybrid_forward": (operator("hybrid_forward"), operands(*LAYER, compression=8)),
    "ops.ffn_aux": (operator("ffn_aux"), operands(*LAYER, compression=8, strategy="row", site=None)),
    "plan": (lambda **facts: routed(Facts("a_call", **facts)), dict),
    "Case": (Case.of, lambda: {"line": "layer"}),
    "hybrid.require_offsets": (hybrid.require_offsets, lambda: {"m": 6_882_960, "n": 5632}),
    "layouts.measured": (
        lambda entries, **content: layouts.measured({"sparsity_figures": entries} | content, 2),
        lambda: {"entries": [[1, 0.5, 0.75], [320, 1, 1]]},
    ),
}  # fmt: skip


class Row(NamedTuple):
    """A change of a right call, as it is written, and the error in full."""

    change: str
    error: str


def sections() -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for line in (Path(__file__).parent / "refusals.txt").read_text().splitlines():
        if line.startswith("["):
            rows = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            changes, _, error = line.partition(" -> ")
            rows.extend(Row(change, error) for change in expanded(changes))
    return found


def expanded(changes: str) -> Iterator[str]:
    for change in changes.split(" | "):
        names, _, value = change.partition("=")
        yield from (f"{name}={value}" for name in names.strip().split("/")) if "/" in names else (change.strip(),)


NAMES = {**globals(), "math": math, "Fused": Fused, "Doubled": Doubled, "Doubling": Doubling}


def refused(call: Callable[..., Any], given: Arguments, change: str) -> tuple[str, Arguments]:
    """What a changed call raised, as the type and its sentence; and the change."""
    changed = eval(f"dict({change})", NAMES, given)
    try:
        call(**{**given, **changed})
    except (TypeError, ValueError, NotImplementedError, RuntimeError, OSError, AttributeError) as error:
        return f"{type(error).__name__}: {error}", changed
    return "nothing was raised", changed


def filled(error: str, changed: Arguments) -> str:
    name, value = next(iter(changed.items()), ("", None))
    for mark, text in (("{name}", name), ("{value}", repr(value)), ("{type}", type(value).__name__)):
        error = error.replace(mark, text)
    return error


def callables(section: str) -> Iterator[tuple[Callable[..., Any], Callable[[], Arguments] | None]]:
    """A callable and its right arguments; an entry point by each way that its strategy can be asked for."""
    if section in CALLS:
        yield CALLS[section]
        return
    entry = ENTRIES[section]
    others = () if "auto" in entry.absent else ("auto", "dense")
    for strategy in (entry.strategy, *others, *([twell.AutoStrategy()] if entry.line.startswith("layer") else ())):
        made = entry.call(strategy)
        yield made.run, lambda made=made: made.given  # type: ignore[misc]


def wrong(section: str, values: bool = True) -> list[str]:
    """The rows of a section whose error is another one, and right calls that it changed, if they have ``values``."""
    found = []
    for i, (call, right) in enumerate(callables(section)):
        with torch.no_grad():
            # the second one may go by what the first one left
            before = [results(call(**right())) for _ in range(2)] if right is not None and section in ENTRIES else []
        for change, error in sections()[section]:
            if i and re.search(r"\b(strategy|invariant)=", change):
                continue
            got, changed = refused(call, right() if right is not None else {}, change)
            if got != filled(error, changed):
                found.append(f"{change}\n  expected {filled(error, changed)}\n  got      {got}")
        if right is not None:
            with torch.no_grad():
                after = call(**right())
            if before and values:
                same(after, before[0], section)
    return found
