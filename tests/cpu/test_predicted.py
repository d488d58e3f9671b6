"""Predicted times beside those of the published tables of decoding, prompts and training, on an H200."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from profiling import figures
from twell.choose import rates
from twell.integrations.analyze import calls
from twell.integrations.analyze.calls import Call
from twell.integrations.analyze.figures import LayerSparsity

# shares of neurons that 128 tokens fire, non-zeros of the heaviest 8 tokens, candidates, of layers of 2,048 and 5,632
WORKLOADS = {
    "uniform29": (0.481, 35.0, 0.69),
    "skew29": (0.170, 75.0, 0.214),
    "topic29": (0.093, 80.0, 0.119),
    "topic128": (0.248, 280.0, 0.296),
    "dense911": (0.993, 1350.0, 0.998),
    "real3": (0.067, 32.0, 0.075),
    "real6": (0.198, 110.0, 0.217),
}
VARIANTS = {"prefill": ("dense eager", "ffn"), "training": ("dense eager train", "train")}
MOST = 0.10


def decoding(gated: bool) -> Iterator[tuple[str, LayerSparsity, Call, str, float]]:
    for row in json.loads((figures.RESULTS / "decode.json").read_text())["rows"]:
        mean = row["share"] * row["n"]
        union = 1 - (1 - row["share"]) ** 128
        layer = LayerSparsity("", 0, row["gated"], row["k"], row["n"], mean=mean, union=union, mixed=union)
        if row["gated"] == gated:
            for name, route in (("dense", "dense"), ("auto", "row")):
                yield f"{row['m']} tokens", layer, Call("decoding", row["m"]), route, row["us"][name]


def layers(name: str, kind: str) -> Iterator[tuple[str, LayerSparsity, Call, str, float]]:
    """Forward passes and training steps of eager dense layers and of "auto"."""
    for row in json.loads((figures.RESULTS / f"{name}.json").read_text())["rows"]:
        variant, workload = row["variant"], row["workload"]
        if row["red"] or variant not in VARIANTS[kind]:
            continue
        union, heaviest, candidates = WORKLOADS[workload]
        if row["k"] != 2048:
            if workload != "uniform29":
                continue
            union = 1 - (1 - row["nnz"] / row["n"]) ** 128
        layer = LayerSparsity("", 0, True, row["k"], row["n"], mean=row["nnz"], union=union, heaviest=heaviest)
        route = "dense" if variant.startswith("dense") else row["strategy"].replace("screened", "union+screen")
        if route.endswith("screen"):
            layer = LayerSparsity(**{**vars(layer), "candidates": candidates})
        if route == "dense" and not variant.startswith("dense"):
            # its passes between the products are fused
            continue
        yield workload, layer, Call(kind, row["tokens"]), route, row["ms"] * 1e3


FAMILIES: dict[str, Any] = {
    "decoding with a gate": lambda: decoding(True),
    "decoding without": lambda: decoding(False),
    # of fewer tokens "union" ran on other tiles then
    "prompts": lambda: (each for each in layers("few", "prefill") if each[2].tokens > 1024 or each[3] != "union"),
    "long prompts": lambda: layers("auto", "prefill"),
    "training": lambda: layers("auto", "training"),
    "training of 0.2": lambda: layers("training", "training"),
    "a large layer's prompts": lambda: layers("large_layer", "prefill"),
    "a large layer's training": lambda: layers("large_layer", "training"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_times_are_those_that_were_measured(family: str) -> None:
    found = {}
    for what, layer, call, route, us in FAMILIES[family]():
        assert rates.MEASURED["16 bits"].apart(layer.k, layer.n) == 1
        seconds = calls.predict(layer, call).seconds
        found[what, layer.k, layer.n, layer.mean, str(call), route] = seconds[route] * 1e6 / us
    off = {row: round(ratio, 2) for row, ratio in found.items() if abs(ratio - 1) > MOST}
    assert found
    assert not off
