"""What ``sparsify`` makes of tiny random models of each architecture, and that the page on models says so."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import twell
from tests.cpu import architectures
from tests.cpu.architectures import ARCHITECTURES, Architecture

transformers = pytest.importorskip("transformers")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: E402

from twell.integrations.sparsify import layers  # noqa: E402
from twell.integrations.transformers import load, sparsify  # noqa: E402


def build(each: Architecture, fields: dict[str, Any], device: str = "cpu") -> Any:
    cls = getattr(transformers, each.kind, None)
    if cls is None:
        pytest.skip(f"this version of transformers has no {each.kind}")
    torch.manual_seed(0)
    with torch.device(device):
        return cls(cls.config_class(**fields)).eval()


def given_to(model: Any) -> dict[str, Any]:
    """A few tokens, of both parts of a model that has two."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (2, 9), generator=generator)
    given: dict[str, Any] = {"input_ids": ids}
    if model.main_input_name == "input_features":
        encoder = getattr(model.config, "encoder_config", None) or model.config
        bins = getattr(encoder, "num_mel_bins", None) or encoder.input_feat_per_channel
        # Whisper takes a fixed length
        length = 2 * getattr(model.config, "max_source_positions", 0) if hasattr(model.config, "num_mel_bins") else 32
        shape = (2, bins, length) if hasattr(model.config, "num_mel_bins") else (2, length, bins)
        given = {"input_features": torch.randn(shape, generator=generator)}
    if model.main_input_name == "pixel_values":
        given = {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    elif model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids
    if model.config.model_type == "udop":
        given["bbox"] = torch.rand(2, 9, 4, generator=generator)
    return given


@pytest.mark.parametrize("each", ARCHITECTURES, ids=lambda each: each.models)
def test_an_architecture_is_taken_or_refused_as_the_page_says(each: Architecture, tmp_path: Path) -> None:
    if each.refusal:
        refused = build(each, each.fields, "meta")
        with pytest.raises(ValueError, match=each.refusal):
            sparsify(refused, activation="relu" if each.retrained else None)
        assert not layers(refused)
    if not each.layers:
        return
    dense = build(each, each.fields)
    ours, activation = copy.deepcopy(dense), None
    if each.retrained:
        with pytest.raises(ValueError, match="must apply ReLU, got "):
            sparsify(ours)
        activation = "relu"
    keys, parameters = list(ours.state_dict()), dict(ours.named_parameters())
    # named: on a CPU "auto" is dense
    sparsify(ours, activation=activation, strategy="union", filter_fn=lambda _, name: each.part in name)
    assert list(layers(ours))[: len(each.layers)] == list(each.layers)
    made = {layer.activation for layer in layers(ours).values()}
    assert made == {"relu" if each.activation == "own" else activation or each.activation}
    assert list(ours.state_dict()) == keys
    assert all(p is parameters[name] for name, p in ours.named_parameters())
    if each.retrained:
        # the stock class computes the same from the configuration
        dense = type(ours)(copy.deepcopy(ours.config)).eval()
        dense.load_state_dict(ours.state_dict())
    # what `twell.analyze` counts is the same before and after, by names of layers
    counted = [{at.name: at for at in twell.analyze(m, [given_to(m)]).layers} for m in (ours, dense)]
    for name, at in counted[0].items():
        other = counted[1][name]
        assert (at.k, at.n, at.gated, at.tokens) == (other.k, other.n, other.gated, other.tokens), name
        assert at.mean == pytest.approx(other.mean, abs=0.1), name
    results: list[Tensor] = [m(**given_to(m))[0] for m in (ours, dense)]
    if type(dense) is MODEL_FOR_CAUSAL_LM_MAPPING.get(type(dense.config), None):
        dense.save_pretrained(tmp_path)
        torch.testing.assert_close(load(tmp_path).eval()(**given_to(dense))[0], results[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    for y in results:
        y.square().sum().backward()
    theirs = dict(dense.named_parameters())
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, theirs[name].grad, rtol=1e-3, atol=1e-4, msg=name)


def test_the_page_has_the_table() -> None:
    page = architectures.PAGE.read_text(encoding="utf-8")
    assert page == architectures.filled(page), "run python -m tests.cpu.architectures"
