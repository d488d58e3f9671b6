"""SAELens: its objects become layers of twell that compute the same, and back."""

from typing import Any

import pytest

pytest.importorskip("sae_lens")

import torch
from sae_lens.registry import get_sae_class, get_sae_training_class

import twell.integrations.sae_lens as twell_sae


def case(name: str, **options: Any) -> Any:
    """A SAE or transcoder of SAELens with random parameters, of which few codes fire."""
    get = get_sae_training_class if name.startswith("training ") else get_sae_class
    name = name.removeprefix("training ")
    crossing = {"d_out": 32, "apply_b_dec_to_input": False} if "transcoder" in name else {}
    kind, config = get(name)
    sae = kind(config(d_in=32, d_sae=256, **crossing, **options))
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter.normal_(std=0.2)
        sae.b_enc.normal_(mean=-0.5, std=0.2)
        if hasattr(sae, "threshold"):
            sae.threshold.uniform_(0, 0.4)
    return sae


INFERENCE: dict[str, dict[str, Any]] = {
    "standard": {},
    "jumprelu": {},
    "topk": {"k": 6},
    "transcoder": {},
    "skip_transcoder": {},
    "jumprelu_transcoder": {},
    "jumprelu_skip_transcoder": {},
}
TRAINING: dict[str, dict[str, Any]] = {
    "training standard": {},
    "training jumprelu": {"jumprelu_bandwidth": 0.3, "pre_act_loss_coefficient": 0.01},
    "training topk": {"k": 6},
    "training batchtopk": {"k": 5.5},
}
ALL = INFERENCE | TRAINING


def gated() -> Any:
    kind, config = get_sae_class("gated")
    return kind(config(d_in=32, d_sae=64))


@pytest.mark.parametrize("name", ALL)
def test_conversions(name: str) -> None:
    theirs = case(name, **ALL[name])
    x = torch.randn(40, 32)
    ours = twell_sae.from_sae_lens(theirs)
    assert ours.training == theirs.training
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    back = twell_sae.to_sae_lens(ours.eval())
    torch.testing.assert_close(back(x), ours(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="must normalise and reshape no activations"):
        twell_sae.from_sae_lens(case("standard", normalize_activations="layer_norm"))
    hooked = case("standard")
    hooked.use_error_term = True
    with pytest.raises(ValueError, match="must have no hooks and no error term"):
        twell_sae.from_sae_lens(hooked)
    hooked.use_error_term = False
    hooked.hook_sae_acts_post.add_hook(lambda a, hook: 2 * a)
    with pytest.raises(ValueError, match="must have no hooks and no error term"):
        twell_sae.from_sae_lens(hooked)
    with pytest.raises(TypeError, match=r"sae must be exactly one of SAELens' StandardSAE, .*, got GatedSAE"):
        twell_sae.from_sae_lens(gated())
