"""A small model of bytes, trained once, and what one of its FFNs returns: the activations of ``sae.py``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import _files
from twell.commands.demo.corpus import Corpus
from twell.commands.demo.model import ByteModel, ModelShape, Schedule, train

from . import RequestError

SHAPE = ModelShape(layers=4, hidden=128, intermediate=1024, context=128)
# windows of a step, and the learning rate
BATCH, RATE = 16, 3e-3


def options(choice: argparse.Namespace, names: tuple[str, ...]) -> dict[str, str]:
    return {name: str(getattr(choice, name)) for name in names}


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a file that appears whole or not."""
    with _files.replacing(path) as partial:
        torch.save(state, partial)


def load(path: Path, same: dict[str, str]) -> dict[str, Any]:
    """The state in a file of a run with the same options; {} if there is none."""
    if not path.exists():
        return {}
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    differing = [name for name, value in same.items() if state["options"][name] != value]
    if differing:
        raise RequestError(f"{path} is of a run with another {', '.join(differing)}: expected a new --out")
    return state


def trained_model(choice: argparse.Namespace, corpus: Corpus, device: torch.device) -> ByteModel | None:
    """The model, trained or from its file; None if its training was interrupted."""
    path = choice.out / "model.pt"
    torch.manual_seed(choice.seed)
    model = ByteModel(SHAPE).to(device)
    same = options(choice, ("text", "seed", "model_steps"))
    state = load(path, same)
    if state:
        model.load_state_dict(state["model"])
        return model.eval().requires_grad_(False)
    schedule = Schedule(BATCH, RATE, 0.0, None, choice.model_steps, choice.report_every)
    history = train(
        model, corpus.train, schedule, choice.seed,
        lambda r: print(f"model  step {r.step:5,}/{choice.model_steps:,}  loss {r.loss:.3f} nats per byte", flush=True),
        lambda: print("stopping: the training of the model is not resumed", flush=True),
    )  # fmt: skip
    if history.interrupted:
        return None
    save(path, {"options": same, "model": model.state_dict()})
    return model.requires_grad_(False)


class Activations:
    """What one FFN of a model returns, [tokens, d], over ``scale``: then the mean of its squares is 1."""

    def __init__(self, model: ByteModel, layer: int, sample: Tensor) -> None:
        self.model, self.scale = model, 1.0
        self._seen = torch.empty(0, device="cpu")
        self._replace: Callable[[Tensor], Tensor] | None = None
        model.mlps[layer].register_forward_hook(self._hook)
        self.scale = float(self.of(sample).square().mean().sqrt())

    def _hook(self, module: Any, inputs: Any, output: tuple[Tensor, Any]) -> Any:
        y, aux = output
        self._seen = y.flatten(0, 1).float() / self.scale
        return None if self._replace is None else ((self._replace(self._seen) * self.scale).view_as(y), aux)

    def of(self, tokens: Tensor) -> Tensor:
        self.loss(tokens)
        return self._seen

    @torch.no_grad()
    def loss(self, tokens: Tensor, replace: Callable[[Tensor], Tensor] | None = None) -> float:
        """Cross-entropy of the model in nats per byte, with activations replaced."""
        self._replace = replace
        logits = self.model(tokens[:, :-1]).logits
        return float(F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()))
