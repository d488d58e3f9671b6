"""Draw dead neurons back towards their initialisation."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from twell.base.arguments import require, require_integer, require_number
from twell.nn import compaction
from twell.nn.converted import FusedGatedMLP
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.recipe._aux import layers


@torch.no_grad()
def reinitialize_dead(
    module: nn.Module,
    dead: Tensor | Mapping[str, Tensor],
    fraction: float = 0.1,
    std: float = 0.02,
    *,
    step: int,
    seed: int = 0,
) -> None:
    """``W <- (1 - fraction) W + fraction N(0, std^2)`` on the gate rows of dead neurons, in place, and on no others.

    Row n of the gate's weight [N, K] (of the up projection if there is no gate) decides whether neuron n fires; it is a
    column in the paper's notation (arXiv 2603.23198, fraction 0.1, std 0.02). Call it after each optimizer step.

    Args:
        module: a layer, or a model with layers.
        dead: bool [N] on the layer's device; for a model a mapping from names of layers to these, as
            ``SparsityTracker.dead`` returns. Layers that it does not name stay as they are.
        step: the noise is a function of ``seed``, this step and the layer's index: the same on all ranks, and after a
            resume.

    It does not wait for the device, and costs for each layer named a draw of [N, K] numbers and two passes over the
    weight, whether or not a neuron is dead. A DTensor (FSDP2, tensor parallel) gets the values of the whole weight:
    each rank draws all the noise. Flat parameters (FSDP1, ZeRO-3) are refused; FSDP1 has ``summon_full_params``.

    The optimizer's state stays as it is: the moments of a dead neuron, which has no gradient, have decayed to nothing.
    An optimizer with its own fp32 copies of 16-bit weights overwrites the result; apply it to those copies then. A
    weight that is frozen, as below an adapter, computed from others, as by weight_norm or pruning, or that layers share
    raises ValueError: ``trained_layers`` has the layers without. Biases stay, and may keep a neuron silent.
    """
    require_number("fraction", fraction, 0, 1)
    require_number("std", std, 0)
    require_integer("step", step, 0)
    require_integer("seed", seed, 0)
    if fraction == 0:
        raise ValueError("fraction must be in (0, 1], got 0")
    found = layers(module)
    if isinstance(dead, Tensor):
        if not isinstance(module, (SparseGatedMLP, SparseMLP)):
            raise TypeError("dead must map names of layers to masks where module is a model, got a tensor")
        dead = {"": dead}
    require("dead", dead, Mapping, "a bool tensor [N] or a mapping from names of layers to these")
    if unknown := dead.keys() - found.keys():
        raise ValueError(f"dead must name layers of the module ({', '.join(found)}), got {', '.join(sorted(unknown))}")
    drawn: list[tuple[int, Tensor, int, Tensor]] = []
    for place, (name, layer) in enumerate(found.items()):
        if name not in dead:
            continue
        where, mask, neurons = name or "the layer", dead[name], layer.intermediate
        if obstacle := _obstacle(layer, found.values()):
            raise ValueError(f"the gate of {where} must {obstacle}: leave the layer out of dead")
        projection, first = _gate_rows(layer)
        weight, rows = projection.weight, 2 * neurons if isinstance(layer, FusedGatedMLP) else neurons
        if weight.dim() != 2 or weight.shape[0] != rows:
            hint = "weights of FSDP1 are whole within summon_full_params, those of fully_shard (FSDP2) need nothing"
            raise ValueError(f"the gate of {where} must have {rows} rows, got {list(weight.shape)}: {hint}")
        require(f"dead of {where}", mask, Tensor, "a bool tensor")
        if mask.dtype != torch.bool or mask.shape != (neurons,):
            raise ValueError(f"dead of {where} must be bool [{neurons}], got {mask.dtype} {list(mask.shape)}")
        drawn.append((place, weight, first, mask))
    for place, weight, first, mask in drawn:
        # neighbouring steps and layers must not share seeds
        number = random.Random(f"{seed} {step} {place}").getrandbits(62)
        source = torch.Generator(weight.device).manual_seed(number)
        _reinitialize(weight, first, mask, fraction, std, source)


def trained_layers(module: nn.Module) -> set[str]:
    """The names of the layers whose dead neurons ``reinitialize_dead`` can draw again: their gate's weight is trained.

    It leaves out those whose gate is frozen, as below an adapter, computed, as by weight_norm, or another layer's, too.
    """
    found = layers(module)
    return {name for name, layer in found.items() if not _obstacle(layer, found.values())}


def _gate_rows(layer: Any) -> tuple[Any, int]:
    """The projection whose weight has the gate's rows, and the first of them: one of gate and up has both."""
    if isinstance(layer, FusedGatedMLP):
        return layer._modules[layer._names[0]], layer.intermediate if layer._up_first else 0
    return compaction.gate_of(layer), 0


def _obstacle(layer: Any, every: Iterable[Any]) -> str:
    """What the gate of a layer among others must be that it is not; "" if nothing."""
    projection, _ = _gate_rows(layer)
    computed = [each for each in ("weight_orig", "weight_g") if each in projection._parameters]
    if computed or parametrize.is_parametrized(projection, "weight"):
        source = " and ".join(computed) or "parametrizations"
        return f"have its weight as a parameter, got one computed from {source}"
    trained = getattr(getattr(projection, "weight", None), "requires_grad", False)
    if not trained:
        return "be trained, got no weight that requires grad"
    others = (_gate_rows(other)[0] for other in every if other is not layer)
    shared = any(getattr(other, "weight", None) is projection.weight for other in others)
    return "have a weight of its own, got one that another layer has, too" if shared else ""


def _reinitialize(weight: Any, first: int, mask: Tensor, fraction: float, std: float, source: torch.Generator) -> None:
    wide = torch.promote_types(weight.dtype, torch.float32)
    neurons, columns = len(mask), weight.shape[1]
    noise = torch.randn((neurons, columns), generator=source, device=weight.device, dtype=wide)
    # the up projection's rows stay
    around = (0, 0, first, weight.shape[0] - neurons - first)
    noise, rows = F.pad(noise, around), F.pad(mask[:, None].expand(neurons, columns), around)
    if hasattr(weight, "placements"):
        noise, rows, weight = _part(noise, weight), _part(rows, weight), weight.to_local()
    drawn = torch.lerp(weight.to(wide), noise * std, fraction)
    weight.copy_(torch.where(rows, drawn.to(weight.dtype), weight))


def _part(whole: Tensor, like: Any) -> Any:
    """This rank's part of ``whole``, a tensor that all ranks have, by the placement of the DTensor ``like``."""
    from torch.distributed.tensor import DTensor, Replicate

    replicas = DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return replicas.redistribute(placements=like.placements).to_local()
