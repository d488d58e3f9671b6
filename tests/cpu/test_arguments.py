"""Arguments of the wrong kind: every public function says what it got and what it expected."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import twell
from twell import distributed, recipe, testing
from twell.nn import SparseGatedMLP, SparseMLP, set_down_layout

BF16 = torch.bfloat16
K, N = 16, 24


def layer() -> SparseMLP:
    return SparseMLP(K, N, dtype=BF16)


def weights() -> dict[str, Any]:
    return {"x": torch.zeros(3, K, dtype=BF16), **{f"w_{n}": torch.zeros(s, dtype=BF16) for n, s in SHAPES.items()}}


SHAPES = {"gate": (N, K), "up": (N, K), "down": (K, N)}


def linear() -> nn.Linear:
    return nn.Linear(K, N)


def callback() -> Any:
    pytest.importorskip("transformers")
    from twell.integrations.transformers import SparsityCallback

    return SparsityCallback


def hf_sparsify(model: Any, **options: Any) -> Any:
    pytest.importorskip("transformers")
    from twell.integrations.transformers import sparsify

    return sparsify(model, **options)


# A function, valid arguments, and for some of them invalid values.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], dict[str, list[Any]]]] = {
    "sparse_gated_ffn": (
        twell.sparse_gated_ffn,
        weights,
        {
            **{name: [None, "x", 3, [1.0]] for name in ("x", "w_gate", "w_up", "w_down")},
            "b_up": [3],
            "strategy": ["rows", None, 3, ["row"]],
            "invariant": [1, "yes", None],
            "compression": [-8, 3, "8", 8.0, None, True],
            "main_grads": [3, torch.zeros(3)],
        },
    ),
    "pack": (
        twell.pack,
        lambda: {name: t for name, t in weights().items() if name in ("x", "w_gate")},
        {"x": [None], "w_gate": ["w"], "compression": [8.0, "8"]},
    ),
    "sparsify_": (
        twell.sparsify_,
        lambda: {"model": nn.Sequential(nn.ModuleDict({"fc1": linear(), "fc2": linear()}))},
        {
            "model": [None, "m", nn.Linear],
            "filter_fn": ["mlp", 3, ["mlp"]],
            "activation": ["silu", 3, nn.ReLU()],
            "compression": [8.0, "8"],
            "strategy": [None, "rows", ["row"]],
        },
    ),
    "sparsify": (hf_sparsify, lambda: {"model": None}, {"model": [None, "m", layer()]}),
    "SparsityCallback": (
        lambda **arguments: callback()(**arguments),
        dict,
        {
            "coefficient": ["a", -1, float("nan")],
            "normalisation": ["sum", None, ["token_sum"]],
            "nnz": ["30", 0, -1, float("nan")],
            "moving_threshold": ["yes", None],
            **{name: ["3", -1, 2.5, None] for name in ("warmup_steps", "warmup_start", "every", "window", "seed")},
            "reinitialize": ["0.1", 2, None, True],
            "csv": [3, True],
            "tensorboard": [3, None],
            "wandb": ["run", None],
        },
    ),
    "SparseGatedMLP": (
        SparseGatedMLP,
        lambda: {"hidden": K, "intermediate": N},
        {
            **{name: ["16", 0, -8, 16.0, None] for name in ("hidden", "intermediate")},
            "strategy": ["rows", None],
            "screen": ["on", True],
            "invariant": [1, None],
            "compression": [8.0, "8", None],
        },
    ),
    "from_linear": (
        SparseMLP.from_linear,
        lambda: {"up": linear(), "down": nn.Linear(N, K)},
        {"up": [None, "up", torch.zeros(N, K)], "down": [linear(), nn.Conv1d(1, 1, 1)], "strategy": ["rows"]},
    ),
    "set_down_layout": (
        set_down_layout,
        lambda: {"module": layer(), "layout": "rows"},
        {"module": [None, "m", linear()], "layout": ["columns", None, ["rows"]]},
    ),
    "explain": (twell.explain, lambda: {"layers": layer()}, {"layers": [None, "m", [layer()]]}),
    "AutoStrategy": (twell.AutoStrategy, dict, {"period": [3, 0, "64", 64.0, True], "screen": ["on", "proven", None]}),
    "compact": (
        twell.compact,
        lambda: {"module": layer(), "alive": torch.ones(N, dtype=torch.bool)},
        {
            "module": [None, "m", linear()],
            "alive": [None, "all", [True], torch.ones(N), {"": 3}],
            "minimum": ["1", 0, 1.5],
        },
    ),
    "restore": (twell.restore, lambda: {"module": None}, {"module": [None, "m", layer()]}),
    "count_firing": (
        lambda model: twell.count_firing(model).__enter__(),
        lambda: {"model": layer()},
        {"model": [None, "m", linear()]},
    ),
    **{
        f.__name__: (f, lambda: {"model": None}, {"model": [None, "m", linear()]})
        for f in (recipe.layers, recipe.record_aux, recipe.clear_aux, recipe.l1_term)
    },
    "convert_coefficient": (
        recipe.convert_coefficient,
        lambda: {"coefficient": 2e-5, "neurons": N, "source": "token_sum", "target": "neuron_mean"},
        {"coefficient": ["a", -1, None], "neurons": [0, "3", None], "source": ["sum", None], "target": [3]},
    ),
    "l1_warmup": (
        recipe.l1_warmup,
        lambda: {"step": 0, "warmup_steps": 3},
        {name: ["3", -1, 2.5, None] for name in ("step", "warmup_steps", "start")},
    ),
    "reinitialize_dead": (
        recipe.reinitialize_dead,
        lambda: {"module": layer(), "dead": torch.zeros(N, dtype=torch.bool), "step": 0},
        {
            "module": [None, "m", linear()],
            "dead": [None, "all", [True], torch.zeros(N), {"": [True]}, {"a": 3}],
            "fraction": ["0.1", 0, 2, None],
            "std": [-1, "a", None],
            "seed": ["a", None],
            "generator": [3, torch.Generator()],
        },
    ),
    "SparsityTracker": (
        recipe.SparsityTracker,
        lambda: {"model": layer()},
        {
            "model": [None, "m", linear()],
            "every": ["100", -1, 2.5, None],
            "window": [0, "1", None],
            "positions": [3, "0", [1, 2], [0, "a"], []],
        },
    ),
    "watch": (
        lambda **arguments: recipe.SparsityTracker(layer()).watch(**arguments).__enter__(),
        lambda: {"step": 0},
        {"step": ["0", -1, None], "positions": [3, torch.zeros(3)]},
    ),
    "StatsWriter": (
        lambda **arguments: recipe.StatsWriter(**arguments),
        lambda: {"path": "unwritten.csv"},
        {"path": [None, 3], "resume_step": ["3", -1, 2.5], "tensorboard": [3, None], "wandb": ["run"]},
    ),
    "write": (
        lambda **arguments: recipe.StatsWriter("unwritten.csv", tensorboard=False).write(**arguments),
        lambda: {"step": 0},
        {"stats": [None, "stats"]},
    ),
    "tensor_parallel_plan": (
        distributed.tensor_parallel_plan,
        lambda: {"model": layer()},
        {"model": [None, "m", linear()]},
    ),
    "SparseMLPParallel": (
        distributed.SparseMLPParallel,
        dict,
        {"input_layouts": ["replicate", 3], "output_layouts": ["shard"], "use_local_output": ["yes", None]},
    ),
    "make": (
        testing.make,
        lambda: {"name": "topic29", "m": 4, "k": 16, "n": 256, "device": "cpu"},
        {"name": [None, "x", ["topic29"]], "m": ["4", None, -1], "k": [1.5], "n": ["n"], "seed": ["a"]},
    ),
    "load": (testing.load, lambda: {"name": "real3", "m": 4}, {"name": [None, 3, "real3"]}),
    "integer_problem": (
        testing.integer_problem,
        lambda: {"m": 4, "k": 16, "n": 256},
        {"m": ["4", -1], "k": [None], "n": [2.5], "density": ["a", 2], "biases": [3, None], "seed": [None]},
    ),
    "errors": (
        testing.errors,
        lambda: {"out": torch.zeros(2, 3), "answer": torch.zeros(2, 3)},
        {"out": [None, "y"], "answer": [None, 3, torch.zeros(3)]},
    ),
}
CASES = [
    pytest.param(function, name, value, id=f"{call}-{name}-{value!r:.30}")
    for call, (_, _, wrong) in CALLS.items()
    for function in [call]
    for name, values in wrong.items()
    for value in values
]


@pytest.mark.parametrize(("function", "name", "value"), CASES)
def test_wrong_arguments_are_named(
    function: str, name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, arguments, _ = CALLS[function]
    with pytest.raises((TypeError, ValueError), match=r"(?s)(must|expected|needs|either).*got"):
        call(**{**arguments(), name: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"x": torch.zeros(3, 8, dtype=BF16)},
            r"x must be \[\.\.\., 16\] \(the others have K = 16, N = 24\), got \[3, 8\]",
        ),
        ({"x": torch.zeros(8, dtype=BF16)}, r"x must be \[\.\.\., 16\] .*, got \[8\]"),
        ({"w_gate": torch.zeros(24, 8, dtype=BF16)}, r"w_gate must be \[24, 16\] .*, got \[24, 8\]"),
        ({"w_gate": torch.zeros(16, 24, dtype=BF16)}, r"w_gate must be \[24, 16\] .*, got \[16, 24\]"),
        ({"w_up": torch.zeros(32, 16, dtype=BF16)}, r"w_up must be \[24, 16\] .*, got \[32, 16\]"),
        ({"w_up": torch.zeros(24, dtype=BF16)}, r"w_up must be \[24, 16\] .*, got \[24\]"),
        ({"w_down": torch.zeros(24, 16, dtype=BF16)}, r"w_down must be \[16, 24\] .*, got \[24, 16\]"),
        ({"b_down": torch.zeros(24, dtype=BF16)}, r"b_down must be \[16\] .*, got \[24\]"),
        ({"x": torch.zeros(3, 16)}, "x must be torch.bfloat16 as the others are, got torch.float32"),
        ({"w_down": torch.zeros(16, 24).half()}, "w_down must be torch.bfloat16 as x is, got torch.float16"),
        ({"x": torch.zeros(3, 16, dtype=BF16, device="meta")}, "x must be on cpu as the others are, got meta"),
        (
            {f"w_{n}": torch.zeros(s, dtype=BF16, device="meta") for n, s in SHAPES.items()},
            "w_gate must be on cpu as x is, got meta",
        ),
    ],
)
def test_the_operand_that_differs_from_the_others_is_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        twell.sparse_gated_ffn(**{**weights(), **wrong})


def test_of_two_operands_x_or_the_second_weight_is_named() -> None:
    w_up = torch.zeros(24, 16, dtype=BF16)
    with pytest.raises(ValueError, match=r"w_down must be \[16, 24\] .*got \[24, 16\]"):
        twell.sparse_ffn(torch.zeros(3, 16, dtype=BF16), w_up, w_up)
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., 16\] .*got \[3, 8\]"):
        twell.pack(torch.zeros(3, 8, dtype=BF16), torch.zeros(24, 16, dtype=BF16))


SETTINGS = {
    "strategy": ("row", ["rows", None, 3, "Row", ["row"]]),
    "screen": ("off", ["on", "", None, True]),
    "invariant": (True, [1, "yes", None]),
    "compression": (4, [3, "8", 8.0, None, True]),
    "down_layout": ("linear", ["columns", None, 3]),
    "record_aux": (True, [1, "yes", None]),
    "accumulate_main_grad": (True, [1, "yes", None]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_layer_refuses_a_wrong_setting_when_it_is_set(name: str) -> None:
    mlp, (right, wrong) = SparseGatedMLP(K, N, dtype=BF16), SETTINGS[name]
    before = getattr(mlp, name)
    for value in wrong:
        with pytest.raises((TypeError, ValueError), match=f"{name} must be .*got"):
            setattr(mlp, name, value)
        assert getattr(mlp, name) == before
    setattr(mlp, name, right)
    for same in (mlp, copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert getattr(same, name) == right
    assert name not in mlp.state_dict()


def test_compiled_layers_follow_their_settings() -> None:
    torch.compiler.reset()
    mlp, x, graphs = layer(), torch.randn(3, K, dtype=BF16), list[str]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(mlp, backend=backend, fullgraph=True)
    with torch.no_grad():
        for strategy, text in (("dense", "linear"), ("row", "'row', None,"), ("union", "'union', None,")):
            mlp.strategy = strategy  # type: ignore[assignment]
            for _ in range(2):
                assert torch.equal(compiled(x), mlp(x))
            assert text in graphs[-1]
            assert ("twell.ffn" in graphs[-1]) == (strategy != "dense")
        assert len(graphs) == 3
        mlp.record_aux = True
        compiled(x)
        assert mlp.aux is not None
