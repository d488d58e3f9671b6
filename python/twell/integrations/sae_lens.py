"""Autoencoders and transcoders of SAELens as ``twell.nn.SparseAutoencoder``, and back.

``pip install sae-lens``; version 6.54 was tested::

    import twell.integrations.sae_lens as twell_sae

    theirs = SAE.from_pretrained("gemma-scope-2b-pt-res-canonical", "layer_20/width_16k/canonical")
    ours = twell_sae.from_sae_lens(theirs.to(torch.bfloat16))
    twell_sae.to_sae_lens(ours).save_model(folder)
"""

from typing import Any

import torch

from twell.base.arguments import require
from twell.call.functional import Strategy
from twell.choose.site import AutoStrategy
from twell.nn import SparseAutoencoder

try:
    import sae_lens
    from sae_lens.registry import get_sae_class
    from sae_lens.saes import batchtopk_sae, transcoder
    from sae_lens.saes.sae import SAE
    from sae_lens.util import dtype_to_str
except ImportError:
    raise ImportError("twell.integrations.sae_lens needs sae-lens: pip install sae-lens") from None

__all__ = ["from_sae_lens", "to_sae_lens"]

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
    uses its moving threshold, as SAELens' saved ones do. Raises TypeError for another class, a subclass of the user's
    included, and ValueError for ``normalize_activations`` in the passes, for "hook_z", another ``d_out``, hooks and an
    error term.
    """
    if type(sae) not in _CLASSES:
        names = ", ".join(each.__name__ for each in _CLASSES)
        raise TypeError(f"sae must be exactly one of SAELens' {names}, got {type(sae).__name__}")
    cfg = sae.cfg
    if cfg.normalize_activations in ("constant_norm_rescale", "layer_norm") or cfg.reshape_activations != "none":
        got = f'"{cfg.normalize_activations}" and "{cfg.reshape_activations}"'
        raise ValueError(f"sae must normalise and reshape no activations, got {got}")
    hooked = any(each._forward_hooks or each._backward_hooks for each in sae.modules())
    if hooked or getattr(sae, "use_error_term", False):
        raise ValueError("sae must have no hooks and no error term: call reset_hooks(), set use_error_term = False")
    if sae.W_dec.shape[1] != cfg.d_in:
        raise ValueError(f"sae must have d_out = d_in = {cfg.d_in}, as the kernels do, got {sae.W_dec.shape[1]}")
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
        *(cfg.d_in, cfg.d_sae),
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
def to_sae_lens(sae: SparseAutoencoder, **config: Any) -> SAE[Any]:
    """SAELens' object for inference with copies of the parameters of ``sae``.

    A skip product makes a transcoder. "batchtopk" becomes JumpReLU, with the moving threshold. ``config`` are more
    arguments of the configuration, ``metadata`` for one. Raises TypeError for another object, and ValueError for "topk"
    with a skip product.
    """
    require("sae", sae, SparseAutoencoder, "a twell.nn.SparseAutoencoder")
    tensors = {name: value for name, value in sae.state_dict().items() if name != "tokens_since_fired"}
    jumps = sae.activation in ("jumprelu", "batchtopk")
    if jumps:
        tensors["threshold"] = tensors["threshold"].clamp(min=0).expand(sae.d_sae)
    config = {"d_in": sae.d_in, "d_sae": sae.d_sae, "dtype": dtype_to_str(sae.W_enc.dtype)} | config
    config |= {"device": str(sae.W_enc.device), "apply_b_dec_to_input": sae.apply_b_dec_to_input}
    if sae.W_skip is not None:
        config["d_out"] = sae.d_in
        if sae.activation == "topk":
            raise ValueError('sae must have no skip product with "topk", got a transcoder')
        name = ("jumprelu_" if jumps else "") + "skip_transcoder"
    else:
        name = "jumprelu" if jumps else "standard" if sae.activation == "relu" else sae.activation
    if sae.activation == "topk":
        config |= {"k": sae.k, "rescale_acts_by_decoder_norm": False}
    kind, form = get_sae_class(name)
    made = kind(form(**config))
    made.load_state_dict(tensors)
    return made.eval()
