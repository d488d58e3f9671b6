"""SAELens: its classes compute the same through twell, its trainer trains them, and its files are read and written."""

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sae_lens")

import numpy as np
import sae_lens
import torch
from sae_lens.config import SAETrainerConfig
from sae_lens.loading import pretrained_sae_loaders
from sae_lens.registry import get_sae_class, get_sae_training_class
from sae_lens.saes.sae import TrainStepInput
from sae_lens.training.sae_trainer import SAETrainer

import twell.integrations.sae_lens as twell_sae
from twell.integrations import gemma_scope


def case(name: str, dtype: str = "float32", **options: Any) -> Any:
    """A SAE or transcoder of SAELens with random parameters, of which few codes fire."""
    get = get_sae_training_class if name.startswith("training ") else get_sae_class
    name = name.removeprefix("training ")
    crossing = {"d_out": 32, "apply_b_dec_to_input": False} if "transcoder" in name else {}
    kind, config = get(name)
    sae = kind(config(d_in=32, d_sae=256, dtype=dtype, **crossing, **options))
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter.normal_(std=0.2)
        sae.b_enc.normal_(mean=-0.5, std=0.2)
        if hasattr(sae, "threshold"):
            sae.threshold.uniform_(0, 0.4)
    return sae


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


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


@pytest.mark.parametrize("name", INFERENCE)
@pytest.mark.parametrize("rescaled", [False, True])
def test_forward_passes_of_theirs(name: str, rescaled: bool) -> None:
    options = {"rescale_acts_by_decoder_norm": True} if rescaled and name == "topk" else {}
    theirs = case(name, "bfloat16", **ALL[name], **options)
    ours = twell_sae.sparsify_(copy.deepcopy(theirs), "union")
    x = torch.randn(3, 40, 32).bfloat16()
    with torch.no_grad():
        assert twell_sae.explain(ours) == {"forward": "twell"}
        assert error(ours(x), theirs(x)) < 0.02
        assert isinstance(ours, type(theirs))
        assert torch.equal(ours.encode(x), theirs.encode(x))
    # on a CPU nothing is gained
    assert twell_sae.explain(twell_sae.sparsify_(ours))["forward"].startswith("SAELens: ")
    assert torch.equal(ours(x), theirs(x))
    twell_sae.restore_(ours)
    assert type(ours) is type(theirs)
    assert ours.W_enc.is_contiguous()


@pytest.mark.parametrize("name", ALL)
def test_what_stays_theirs(name: str, tmp_path: Path) -> None:
    theirs = case(name, **ALL[name])
    ours = copy.deepcopy(twell_sae.sparsify_(copy.deepcopy(theirs), "union"))
    x = torch.randn(40, 32)
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)
    assert ours.W_enc.t().is_contiguous()
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()), assign=True)
    assert ours.W_enc.t().is_contiguous()
    ours.save_model(tmp_path)
    for kind in (type(theirs), type(ours)):
        loaded = kind.load_from_disk(tmp_path)
        assert type(loaded) is type(theirs)
        assert torch.equal(loaded.encode(x), theirs.encode(x))
    if name in TRAINING:
        ours.save_inference_model(tmp_path)
        theirs.save_inference_model(tmp_path / "theirs")
        read, right = (sae_lens.SAE.load_from_disk(path) for path in (tmp_path, tmp_path / "theirs"))
        assert torch.equal(read(x), right(x))
    if "topk" not in name:
        ours.fold_W_dec_norm()
        theirs.fold_W_dec_norm()
        torch.testing.assert_close(ours.encode(x), theirs.encode(x))
    assert ours.to(torch.bfloat16).W_enc.t().is_contiguous()
    assert ours.cfg.dtype == "bfloat16"


def test_what_runs_their_code() -> None:
    x = torch.randn(8, 32).bfloat16()

    def reason(sae: Any, training: bool = False) -> str:
        with torch.set_grad_enabled(training):
            return twell_sae.explain(sae)["training_forward_pass" if training else "forward"]

    sae = twell_sae.sparsify_(case("standard", "bfloat16"), "union")
    seen: list[torch.Size] = []
    sae.hook_sae_acts_post.add_hook(lambda acts, hook: seen.append(acts.shape))
    sae(x)
    assert seen == [(8, 256)]
    assert reason(sae) == "SAELens: hooks on hook_sae_acts_post"
    sae.reset_hooks()
    assert reason(sae) == "twell"
    sae.decode = sae.decode
    assert reason(sae) == "SAELens: methods that were replaced, decode"
    del sae.decode
    top = twell_sae.sparsify_(case("topk", "bfloat16", k=6), "union")
    assert reason(top) == "twell"
    top.activation_fn = torch.nn.ReLU()
    assert reason(top) == "SAELens: an activation function of its own, ReLU"
    with pytest.warns(DeprecationWarning, match="use_error_term"):
        sae.use_error_term = True
    assert reason(sae) == "SAELens: the error term"
    odd = {
        "training standard": {"lp_norm": 0.5},
        "training jumprelu": {"jumprelu_ste_to_input": True},
        "training topk": {"k": 6, "normalize_activations": "layer_norm"},
    }
    for name, options in odd.items():
        key, value = list(options.items())[-1]
        assert str(value) in reason(twell_sae.sparsify_(case(name, **options), "union"), True), key
    quadratic = case("training jumprelu", jumprelu_sparsity_loss_mode="tanh")
    assert reason(twell_sae.sparsify_(quadratic, "union"), True) == 'SAELens: jumprelu_sparsity_loss_mode="tanh"'
    low = twell_sae.sparsify_(case("training jumprelu", "bfloat16"), "union")
    with torch.no_grad():
        low.threshold[3] = -1
    assert reason(low) == "SAELens: a threshold below 0"
    with pytest.raises(ValueError, match="strategy must be"):
        twell_sae.sparsify_(case("standard"), "fast")  # type: ignore[arg-type]


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
    back = twell_sae.to_sae_lens(ours, training=name in TRAINING)
    torch.testing.assert_close(back(x), theirs(x), rtol=1e-4, atol=1e-5)
    inference = twell_sae.to_sae_lens(ours.eval())
    torch.testing.assert_close(inference(x), ours(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="must normalise and reshape no activations"):
        twell_sae.from_sae_lens(case("standard", normalize_activations="layer_norm"))
    for of in (twell_sae.from_sae_lens, twell_sae.sparsify_):
        with pytest.raises(TypeError, match=r"sae must be exactly one of SAELens' StandardSAE, .*, got GatedSAE"):
            of(gated())


def step_of(sae: Any, x: torch.Tensor, dead: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A step as SAELens' trainer makes it: the output, what fired, and how often."""
    coefficients = {"l1": 0.3, "l0": 0.2}
    output = sae.training_forward_pass(TrainStepInput(x, coefficients, dead, 0, False))
    fired = output.feature_acts.bool().float()
    output.loss.backward()
    return output, fired.sum(-2).bool(), fired.sum(0)


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("autocast", [False, True])
def test_training_steps_of_theirs(name: str, autocast: bool) -> None:
    if autocast and "topk" not in name:
        pytest.skip("pre-activations near a threshold fire in one and not in the other")
    theirs = case(name, **ALL[name])
    ours = twell_sae.sparsify_(copy.deepcopy(theirs), "union")
    assert twell_sae.explain(ours)["training_forward_pass"] == "twell"
    x, dead = torch.randn(64, 32), torch.rand(256) < 0.3
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (right, *fired), (found, *firing) = step_of(theirs, x, dead), step_of(ours, x, dead)
    for one, other in zip(firing, fired, strict=True):
        assert torch.equal(one, other)
    assert found.losses.keys() == right.losses.keys()
    close = {"rtol": 0.02, "atol": 0.05} if autocast else {"rtol": 1e-4, "atol": 1e-5}
    for loss in found.losses:
        torch.testing.assert_close(found.losses[loss], right.losses[loss], **close)
    for (parameter, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert error(weight.grad, other.grad) < (0.02 if autocast else 1e-3), parameter
    # read late, after the parameters have changed
    with torch.no_grad():
        for weight in ours.parameters():
            weight.add_(1)
    assert isinstance(found.feature_acts, torch.Tensor)
    assert found.feature_acts.shape == right.feature_acts.shape
    torch.testing.assert_close(found.feature_acts + 0, right.feature_acts, **close)
    torch.testing.assert_close(found.hidden_pre + 0, right.hidden_pre, **close)
    for buffer, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(buffer, other)


@pytest.mark.parametrize("name", TRAINING)
def test_their_trainer(name: str, tmp_path: Path) -> None:
    theirs = case(name, **ALL[name])
    ours = twell_sae.sparsify_(copy.deepcopy(theirs), "union")
    batches = [torch.randn(64, 32) for _ in range(8)]
    config = SAETrainerConfig(
        n_checkpoints=0,
        checkpoint_path=str(tmp_path),
        save_final_checkpoint=True,
        total_training_samples=64 * len(batches),
        device="cpu",
        autocast=False,
        lr=1e-3,
        lr_end=1e-4,
        lr_scheduler_name="constant",
        lr_warm_up_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        lr_decay_steps=0,
        n_restart_cycles=1,
        train_batch_size_samples=64,
        dead_feature_window=3,
        feature_sampling_window=100,
        logger=sae_lens.LoggingConfig(log_to_wandb=False),
    )
    trainers = [SAETrainer(config, sae, iter(batches)) for sae in (theirs, ours)]
    for trainer in trainers:
        trainer.fit()
    torch.testing.assert_close(trainers[1].act_freq_scores, trainers[0].act_freq_scores)
    for (parameter, weight), other in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert error(weight, other[1]) < 1e-3, parameter


def test_gemma_scope_is_read_as_their_loader_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = case("jumprelu", apply_b_dec_to_input=False)
    np.savez(tmp_path / "params.npz", **{name: t.detach().numpy() for name, t in made.state_dict().items()})
    monkeypatch.setattr(pretrained_sae_loaders, "hf_hub_download", lambda *_, **__: tmp_path / "params.npz")
    where = "google/gemma-scope-2b-pt-res", "layer_20/width_16k/average_l0_71"
    _, tensors, _ = pretrained_sae_loaders.gemma_2_sae_huggingface_loader(*where)
    theirs = case("jumprelu", apply_b_dec_to_input=False)
    theirs.load_state_dict(tensors)
    x = torch.randn(40, 32)
    torch.testing.assert_close(gemma_scope.load(tmp_path / "params.npz")(x), theirs(x))
