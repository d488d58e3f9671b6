"""Sparse autoencoders of SAELens to and from ``twell.nn``. ``pip install sae-lens``; version 6.54 was tested."""

from typing import Any

import torch

from twell.base.arguments import require
from twell.call.functional import Strategy
from twell.choose.site import AutoStrategy
from twell.nn.layers import SparseAutoencoder

try:
    import sae_lens
    from sae_lens.registry import get_sae_class, get_sae_training_class
    from sae_lens.saes import batchtopk_sae, transcoder
    from sae_lens.saes.sae import SAE
    from sae_lens.util import dtype_to_str
except ImportError:
    raise ImportError("twell.integrations.sae_lens needs sae-lens: pip install sae-lens") from None

__all__ = ["from_sae_lens", "to_sae_lens"]

_NORMALISED = ("constant_norm_rescale", "layer_norm")
_CLASSES = (
    *(sae_lens.StandardSAE, sae_lens.StandardTrainingSAE, sae_lens.JumpReLUSAE, sae_lens.JumpReLUTrainingSAE),
    *(sae_lens.TopKSAE, sae_lens.TopKTrainingSAE, sae_lens.BatchTopKTrainingSAE),
    *(transcoder.Transcoder, transcoder.SkipTranscoder),
    *(transcoder.JumpReLUTranscoder, transcoder.JumpReLUSkipTranscoder),
)


@torch.no_grad()
def from_sae_lens(sae: SAE[Any], strategy: Strategy | AutoStrategy = "auto") -> SparseAutoencoder:
    """A ``twell.nn.SparseAutoencoder`` with copies of the parameters of ``sae``, in the same mode.

    It computes what ``sae`` does. Norms of ``rescale_acts_by_decoder_norm`` are folded, and BatchTopK in ``eval`` mode
    uses its moving threshold, as SAELens' saved ones do. Raises TypeError for another class, and ValueError for
    ``normalize_activations`` in the passes, and for "hook_z".
    """
    if type(sae) not in _CLASSES:
        names = ", ".join(each.__name__ for each in _CLASSES)
        raise TypeError(f"sae must be exactly one of SAELens' {names}, got {type(sae).__name__}")
    cfg = sae.cfg
    if cfg.normalize_activations in _NORMALISED or cfg.reshape_activations != "none":
        got = f'"{cfg.normalize_activations}" and "{cfg.reshape_activations}"'
        raise ValueError(f"sae must normalise and reshape no activations, got {got}")
    tensors = dict(sae.state_dict())
    k, activation = getattr(cfg, "k", None), "relu"
    if k is not None:
        activation = "batchtopk" if isinstance(sae, batchtopk_sae.BatchTopKTrainingSAE) else "topk"
    elif "threshold" in tensors:
        activation = "jumprelu"
    if getattr(cfg, "rescale_acts_by_decoder_norm", False):
        norms = sae.get_W_dec_norm()
        tensors |= {"W_enc": sae.W_enc * norms, "b_enc": sae.b_enc * norms, "W_dec": sae.W_dec / norms[:, None]}
    if activation == "batchtopk":
        tensors["threshold"] = tensors.pop("topk_threshold")
    made = SparseAutoencoder(
        *(cfg.d_in, cfg.d_sae, sae.W_dec.shape[1]),
        activation=activation,  # type: ignore[arg-type]
        k=k,
        bandwidth=getattr(sae, "bandwidth", 0.05),
        threshold_rate=getattr(cfg, "topk_threshold_lr", 0.01),
        skip="W_skip" in tensors,
        apply_b_dec_to_input=cfg.apply_b_dec_to_input,
        strategy=strategy,
        device=sae.W_enc.device,
        dtype=sae.W_enc.dtype,
    )
    made.load_state_dict(tensors)
    return made.train(sae.training)


@torch.no_grad()
def to_sae_lens(sae: SparseAutoencoder, *, training: bool = False, **config: Any) -> SAE[Any]:
    """SAELens' object with copies of the parameters of ``sae``: for inference, or ``training``.

    A skip product or another ``d_out`` makes a transcoder, which SAELens does not train. "batchtopk" becomes JumpReLU
    for inference, with the moving threshold. ``config`` are more arguments of the configuration, ``metadata`` for one.
    Raises TypeError for another object, and ValueError for training of a transcoder.
    """
    require("sae", sae, SparseAutoencoder, "a twell.nn.SparseAutoencoder")
    crossing = sae.W_skip is not None or sae.d_out != sae.d_in
    if training and crossing:
        raise ValueError(f"training must be False for a transcoder, got {training}")
    tensors = {name: value for name, value in sae.state_dict().items() if name != "tokens_since_fired"}
    tensors["W_dec"] = sae.decoder
    jumps = sae.activation == "jumprelu" or (sae.activation == "batchtopk" and not training)
    if sae.activation == "batchtopk":
        tensors["threshold" if jumps else "topk_threshold"] = tensors.pop("threshold")
    if jumps:
        tensors["threshold"] = tensors["threshold"].clamp(min=0).expand(sae.d_sae)
    config = {"d_in": sae.d_in, "d_sae": sae.d_sae, "dtype": dtype_to_str(sae.W_enc.dtype)} | config
    config |= {"device": str(sae.W_enc.device), "apply_b_dec_to_input": sae.apply_b_dec_to_input}
    if crossing:
        config["d_out"] = sae.d_out
        if sae.activation == "topk":
            raise ValueError('sae must have no skip product and d_out = d_in with "topk", got a transcoder')
        name = ("jumprelu_" if jumps else "") + ("skip_" if sae.W_skip is not None else "") + "transcoder"
    else:
        name = "jumprelu" if jumps else "standard" if sae.activation == "relu" else sae.activation
        if name in ("topk", "batchtopk"):
            config |= {"k": sae.k, "rescale_acts_by_decoder_norm": False}
    if training:
        if jumps:
            config["jumprelu_bandwidth"] = sae.bandwidth
        if name == "batchtopk":
            config["topk_threshold_lr"] = sae.threshold_rate
    kind, form = (get_sae_training_class if training else get_sae_class)(name)
    made = kind(form(**config))
    made.load_state_dict(tensors)
    return made.train(sae.training)
