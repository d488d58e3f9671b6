"""Tests with a serving engine: `make test-serving` installs it. Checkpoints are tiny and random."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from served import Serve, Served, checkpoint

# A prompt in one chunk, one that prefill takes in two, and a single token.
PROMPTS = [list(range(1, 8)), [(7 * i) % 120 + 1 for i in range(200)], [3]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vllm is not installed; `make test-serving` installs it"))


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that starts an engine in a process of its own, with and without the plug-in.

    ``request`` adds to that of engine.py, ``variables`` to the environment, the rest to the engine's options.
    """
    cache = tmp_path_factory.mktemp("vllm")

    def run(
        model: Path,
        plugin: bool = True,
        request: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        **engine: Any,
    ) -> subprocess.CompletedProcess[str]:
        options = {"dtype": "float16", "enforce_eager": True, "max_num_batched_tokens": 128} | engine
        if options.get("tensor_parallel_size", 1) == 1:
            options["distributed_executor_backend"] = "uni"
        content = {"model": str(model), "prompts": PROMPTS, "tokens": 8, "engine": options, **(request or {})}
        environment = os.environ | {
            "TWELL_VLLM": "auto" if plugin else "off",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(cache),
            # two ranks on one NUMA node, and tests side by side
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            # engine.py sends a function to the workers
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "HF_HUB_OFFLINE": "1",
            **(variables or {}),
        }
        command = [sys.executable, str(Path(__file__).with_name("engine.py")), json.dumps(content)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)

    return run


@pytest.fixture(scope="session")
def serve(run: Callable[..., subprocess.CompletedProcess[str]]) -> Serve:
    """A function that serves ``PROMPTS`` and returns ``Served``; its arguments are those of ``run``."""

    def serve(model: Path, **options: Any) -> Served:
        done = run(model, **options)
        log = done.stdout + done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert done.returncode == 0, log[-8000:]
        return Served(**json.loads(lines[0].removeprefix("RESULT ")), log=log)

    return serve


@pytest.fixture(scope="session")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("relu"), "relu")


@pytest.fixture(scope="session")
def expected(relu: Path, serve: Serve) -> list[list[int]]:
    """The tokens of ``relu`` without the plug-in."""
    served = serve(relu, plugin=False, model_impl="transformers")
    assert served.model == "TransformersForCausalLM"
    assert served.layers == []
    return served.tokens
