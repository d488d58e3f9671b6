"""Autoencoders and transcoders of SAELens through twell. ``pip install sae-lens``; version 6.54 was tested.

``sparsify_`` takes an object in place. Its class becomes a subclass of its own, so ``isinstance``, ``cfg``,
``state_dict``, saving, ``to``, ``fold_W_dec_norm`` and copies stay those of SAELens, and SAELens trains it::

    sae = SAE.from_pretrained("gemma-scope-2b-pt-res-canonical", "layer_20/width_16k/canonical").to(torch.bfloat16)
    twell_sae.sparsify_(sae)  # import twell.integrations.sae_lens as twell_sae
    y = sae(x)
    print(twell_sae.explain(sae))

``forward`` and ``training_forward_pass`` run ``twell.sparse_ffn`` where that computes the same up to rounding, and
SAELens' own code elsewhere, which is logged once at INFO; ``encode`` and ``decode`` are always SAELens'. On a GPU the
kernels want 16 bits: a SAE in bfloat16, or one in float32 under autocast, which SAELens' trainer has
(``autocast=True``).

What differs: the pre-activation is rounded once, after its bias, so one that is as near to its threshold may fire in
one and not in the other. TopK and BatchTopK choose by SAELens' own code, and keep the same features. Where a decoder's
norms matter, in ``rescale_acts_by_decoder_norm`` and in the L1 loss, they are folded into the encoder's and
the decoder's rows in each call; in the L1 loss a row of zeros then gets no gradient. ``TrainStepOutput.feature_acts``
and ``hidden_pre`` are computed when they are read, dense; what SAELens' trainer reads in each step, who fired, is known
already. For that an output holds the encoder's weight as the step read it.

``W_enc`` is stored as the transposed view of rows, which kernels read in place. Its shape and values stay, and so do
files. ``safetensors.torch.save_file(sae.state_dict(), ...)`` wants ``W_enc`` contiguous: use ``save_model``. Call
``sparsify_`` before an optimizer has state.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from twell.base.arguments import require
from twell.call import functional
from twell.call.choice import Selection, rounded_down
from twell.call.execution import Aux
from twell.call.functional import Strategy
from twell.choose.plan import Facts, routed
from twell.choose.site import AutoStrategy, tokens_of
from twell.nn import SparseAutoencoder, down_layout
from twell.nn.autoencoder import of_choice, why_dense
from twell.ops.operands import Layer
from twell.runtime import modes
from twell.runtime.log import info_once

try:
    import sae_lens
    from sae_lens.registry import get_sae_class, get_sae_training_class
    from sae_lens.saes import batchtopk_sae, jumprelu_sae, topk_sae, transcoder
    from sae_lens.saes.sae import SAE, TrainingSAE, TrainStepInput, TrainStepOutput
    from sae_lens.util import dtype_to_str
    from transformer_lens.hook_points import HookPoint
except ImportError:
    raise ImportError("twell.integrations.sae_lens needs sae-lens: pip install sae-lens") from None

__all__ = ["explain", "from_sae_lens", "restore_", "sparsify_", "to_sae_lens"]

_NORMALISED = ("constant_norm_rescale", "layer_norm")
# methods that an object may have been given in place of its class's
_METHODS = ("encode", "decode", "encode_with_hidden_pre", "calculate_aux_loss", "process_sae_in")


class _Sparse:
    """What a class of SAELens gets: its forward passes through twell."""

    _base: ClassVar[type[SAE[Any]]]
    _strategy: Strategy | AutoStrategy

    def forward(self: Any, x: Tensor) -> Tensor:
        """As SAELens'."""
        if why := _why_not(self, training=False):
            _say(f"{self._base.__name__} runs SAELens' code: {why}")
            return self._base.forward(self, x)  # type: ignore[no-any-return]
        y, _, _ = _run(self, x, None)
        if isinstance(self, transcoder.SkipTranscoder):
            y = y + x @ self.W_skip.T.to(x.device)
        # transcoders have no such hook in their forward pass
        return y if isinstance(self, transcoder.Transcoder) else self.hook_sae_output(y)

    def process_state_dict_for_saving(self: Any, state_dict: dict[str, Any]) -> None:
        """As SAELens', with ``W_enc`` as files have it."""
        self._base.process_state_dict_for_saving(self, state_dict)
        state_dict["W_enc"] = state_dict["W_enc"].contiguous()

    @classmethod
    def get_sae_class_for_architecture(cls, architecture: str) -> Any:
        """As SAELens'."""
        return cls._base.get_sae_class_for_architecture(architecture)


class _SparseTraining(_Sparse):
    """The same for a class with a training step."""

    def process_state_dict_for_saving_inference(self: Any, state_dict: dict[str, Any]) -> None:
        """As SAELens', with ``W_enc`` as files have it."""
        self._base.process_state_dict_for_saving_inference(self, state_dict)
        state_dict["W_enc"] = state_dict["W_enc"].contiguous()

    def training_forward_pass(self: Any, step_input: TrainStepInput) -> TrainStepOutput:
        """As SAELens'."""
        if isinstance(self, jumprelu_sae.JumpReLUTrainingSAE):
            with torch.no_grad():
                self.threshold.data.clamp_(min=0.0)
        if why := _why_not(self, training=True):
            _say(f"a training step of {self._base.__name__} runs SAELens' code: {why}")
            return self._base.training_forward_pass(self, step_input)
        sae_in, counts = step_input.sae_in, torch.zeros(self.cfg.d_sae, dtype=torch.int64, device=self.device)
        sae_out, aux, step = _run(self, sae_in, counts)
        losses = {"mse_loss": self.mse_loss_fn(sae_out, sae_in).sum(dim=-1).mean()}
        losses |= _aux_losses(self, step_input, aux, step.x, sae_out)
        acts, hidden = _Later.of(step, 0, counts), _Later.of(step, 1, None)
        output = TrainStepOutput(sae_in, sae_out, acts, hidden, torch.stack(list(losses.values())).sum(), losses)
        if isinstance(self, batchtopk_sae.BatchTopKTrainingSAE):
            output.metrics["topk_threshold"] = self.topk_threshold
        return output


def _subclass(base: type[SAE[Any]]) -> type[SAE[Any]]:
    kind = _SparseTraining if issubclass(base, TrainingSAE) else _Sparse
    own = {name: getattr(base, name, None) for name in _METHODS}
    return type(f"Sparse{base.__name__}", (kind, base), {"__module__": __name__, "_base": base, "_own": own})


_CLASSES = {
    base: _subclass(base)
    for base in (
        *(sae_lens.StandardSAE, sae_lens.StandardTrainingSAE, sae_lens.JumpReLUSAE, sae_lens.JumpReLUTrainingSAE),
        *(sae_lens.TopKSAE, sae_lens.TopKTrainingSAE, sae_lens.BatchTopKTrainingSAE),
        *(transcoder.Transcoder, transcoder.SkipTranscoder),
        *(transcoder.JumpReLUTranscoder, transcoder.JumpReLUSkipTranscoder),
    )
}


def _base_of(sae: SAE[Any]) -> type[SAE[Any]]:
    """SAELens' class of ``sae``; TypeError unless it is one of ``_CLASSES``."""
    base = sae._base if isinstance(sae, _Sparse) else type(sae)
    if base not in _CLASSES:
        names = ", ".join(each.__name__ for each in _CLASSES)
        raise TypeError(f"sae must be exactly one of SAELens' {names}, got {type(sae).__name__}")
    return base


def sparsify_(sae: SAE[Any], strategy: Strategy | AutoStrategy = "auto") -> SAE[Any]:
    """Let ``sae`` run through twell, in place; return it.

    ``strategy`` is that of ``twell.sparse_ffn``; "auto" gives it an ``AutoStrategy`` of its own. A second call changes
    the strategy. Parameters stay the same objects. Raises TypeError for an object of another class, a subclass of the
    user included, since what it overrides would not be called.
    """
    base = _base_of(sae)
    routed(Facts(strategy="auto" if isinstance(strategy, AutoStrategy) else strategy))
    if not isinstance(sae, _Sparse):
        # load_state_dict(assign=True) replaces rows with contiguous tensors
        sae.register_load_state_dict_post_hook(_lay)
    sae.__class__ = _CLASSES[base]
    sae._strategy = AutoStrategy() if strategy == "auto" else strategy
    _lay(sae)
    return sae


def restore_(sae: SAE[Any]) -> SAE[Any]:
    """Undo ``sparsify_``, in place; return ``sae``. Raises TypeError for another object."""
    require("sae", sae, _Sparse, "what sparsify_ returned")
    sae.__class__ = sae._base
    del sae._strategy
    for key, hook in list(sae._load_state_dict_post_hooks.items()):
        if hook is _lay:
            del sae._load_state_dict_post_hooks[key]
    down_layout.store(sae.W_enc, rows=False)
    return sae


def explain(sae: SAE[Any]) -> dict[str, str]:
    """What runs each pass of ``sae`` with its hooks, settings and autograd mode of now: "twell", or SAELens and why."""
    require("sae", sae, _Sparse, "what sparsify_ returned")
    passes = {"forward": False, "training_forward_pass": True}
    if not isinstance(sae, _SparseTraining):
        del passes["training_forward_pass"]
    found = {name: _why_not(sae, training) for name, training in passes.items()}
    return {name: f"SAELens: {why}" if why else "twell" for name, why in found.items()}


@torch.no_grad()
def from_sae_lens(sae: SAE[Any], strategy: Strategy | AutoStrategy = "auto") -> SparseAutoencoder:
    """A ``twell.nn.SparseAutoencoder`` with copies of the parameters of ``sae``, in the same mode.

    It computes what ``sae`` does. Norms of ``rescale_acts_by_decoder_norm`` are folded, and BatchTopK in ``eval`` mode
    uses its moving threshold, as SAELens' saved ones do. Raises TypeError for a class that ``sparsify_`` does not take,
    and ValueError for ``normalize_activations`` in the passes, and for "hook_z".
    """
    base = _base_of(sae)
    cfg = sae.cfg
    if cfg.normalize_activations in _NORMALISED or cfg.reshape_activations != "none":
        got = f'"{cfg.normalize_activations}" and "{cfg.reshape_activations}"'
        raise ValueError(f"sae must normalise and reshape no activations, got {got}")
    tensors = dict(sae.state_dict())
    k, activation = getattr(cfg, "k", None), "relu"
    if k is not None:
        activation = "batchtopk" if issubclass(base, batchtopk_sae.BatchTopKTrainingSAE) else "topk"
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


def _lay(sae: Any, incompatible_keys: Any = None) -> None:
    """Store both weights by rows of neurons."""
    down_layout.store(sae.W_enc, rows=True)
    down_layout.store(sae.W_dec, rows=False)


def _say(message: str) -> None:
    if not modes.compiling():
        info_once(message)


def _why_not(sae: Any, training: bool) -> str:
    """Why a pass of ``sae`` runs SAELens' own code; "" if it runs twell's."""
    cfg = sae.cfg
    if training and modes.compiling():
        return "a trace of torch.compile"
    if replaced := [name for name, own in sae._own.items() if _replaced(sae, name, own)]:
        return f"methods that were replaced, {', '.join(replaced)}"
    points = ("hook_sae_acts_pre", "hook_sae_acts_post", *(("hook_sae_input",) if training else ()))
    if hooked := [name for name in points if not _is_silent(getattr(sae, name))]:
        return f"hooks on {', '.join(hooked)}"
    if type(sae.activation_fn) is not _activation_of(sae):
        return f"an activation function of its own, {type(sae.activation_fn).__name__}"
    if sae.use_error_term and not training:
        return "the error term"
    jumping = isinstance(sae, jumprelu_sae.JumpReLUTrainingSAE)
    if jumping and cfg.jumprelu_ste_to_input and torch.is_grad_enabled():
        return "jumprelu_ste_to_input=True"
    if jumping and not training and bool((sae.threshold < 0).any()):
        return "a threshold below 0"
    if training and (why := _why_not_losses(sae)):
        return why
    dtype = modes.product_dtype(sae.dtype, sae.device.type)
    return why_dense(sae._strategy, cfg.d_sae, cfg.d_in, sae.W_dec.shape[1], dtype, sae.W_enc.device)


def _activation_of(sae: Any) -> type[nn.Module]:
    """The kind of activation that the class of ``sae`` gives itself."""
    if isinstance(sae, batchtopk_sae.BatchTopKTrainingSAE):
        return batchtopk_sae.BatchTopK  # type: ignore[no-any-return]
    topk = isinstance(sae, (topk_sae.TopKSAE, topk_sae.TopKTrainingSAE))
    return topk_sae.TopK if topk else nn.ReLU


def _why_not_losses(sae: Any) -> str:
    """What the losses of ``sae`` need that twell does not return."""
    cfg = sae.cfg
    if getattr(cfg, "lp_norm", 1) != 1:
        return f"lp_norm = {cfg.lp_norm}"
    mode = getattr(cfg, "jumprelu_sparsity_loss_mode", "step")
    if mode != "step":
        return f'jumprelu_sparsity_loss_mode="{mode}"'
    if isinstance(sae, topk_sae.TopKTrainingSAE) and cfg.normalize_activations in _NORMALISED:
        return f'normalize_activations="{cfg.normalize_activations}"'
    return ""


def _replaced(sae: Any, name: str, own: Any) -> bool:
    """Whether a method is another than SAELens', of the object or of its class."""
    return name in sae.__dict__ or getattr(sae._base, name, None) is not own


def _is_silent(point: nn.Module) -> bool:
    """Whether calling ``point`` returns its input and does nothing else."""
    hooks = (point._forward_hooks, point._forward_pre_hooks, point._backward_hooks, point._backward_pre_hooks)
    of_all = ("forward", "forward_pre", "backward", "backward_pre")
    hooks += tuple(getattr(nn.modules.module, f"_global_{name}_hooks") for name in of_all)
    return type(point) in (HookPoint, topk_sae.SparseHookPoint, nn.Identity) and not any(hooks)


def _run(sae: Any, x: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Aux, _Step]:
    """``sae.decode(sae.encode(x))``, the figures, and what the encoder read; with ``counts`` for training.

    In training of a standard SAE ``aux.l1`` is of codes times the norms of their decoder rows.
    """
    x = sae.process_sae_in(x)
    options: dict[str, Any] = {"activation": "relu", "strategy": sae._strategy, "return_aux": True}
    if isinstance(sae, jumprelu_sae.JumpReLUTrainingSAE):
        options |= {"activation": "fatrelu", "threshold": sae.threshold.detach()}
        if torch.is_grad_enabled() and sae.threshold.requires_grad:
            options |= {"threshold": sae.threshold, "bandwidth": sae.bandwidth}
    elif hasattr(sae, "threshold"):
        # these apply ReLU, too, and give the threshold no gradient
        # rounded down, as SAELens compares with the threshold as it is
        dtype = modes.product_dtype(x.dtype, x.device.type)
        options |= {"activation": "fatrelu", "threshold": rounded_down(sae.threshold.detach().clamp(min=0), dtype)}
    w_enc, b_enc, w_dec, norms, codes = sae.W_enc.t(), sae.b_enc, sae.W_dec, None, None
    weighted = counts is not None and isinstance(sae, sae_lens.StandardTrainingSAE)
    if weighted or getattr(sae.cfg, "rescale_acts_by_decoder_norm", False):
        norms = w_dec.norm(dim=-1).clamp(min=torch.finfo(w_dec.dtype).tiny)
        w_enc, b_enc, w_dec = w_enc * norms[:, None], b_enc * norms, w_dec / norms[:, None]
    if counts is not None:
        options["counts"] = counts
        # a tensor that the optimizer does not change
        dtype = modes.product_dtype(w_enc.dtype, w_enc.device.type)
        w_enc = w_enc.to(dtype, copy=norms is None)
    if _activation_of(sae) is not nn.ReLU:
        codes = _codes(sae, x)
        if counts is not None and isinstance(sae, batchtopk_sae.BatchTopKTrainingSAE):
            sae.update_topk_threshold(codes)
        codes = codes.to(modes.product_dtype(x.dtype, x.device.type))
        choice = Selection(most=int(sae.activation_fn.k * tokens_of(x)), codes=codes)
        y, aux = of_choice(Layer(x, w_enc, None, w_dec.t(), b_enc), choice, sae._strategy, counts)
    else:
        y, aux = functional.sparse_ffn(x, w_enc, w_dec.t(), b_up=b_enc, **options)
    # under autocast the product has 16 bits and the sum not
    y = sae.hook_sae_recons(y + sae.b_dec)
    if not isinstance(sae, transcoder.Transcoder):
        y = sae.reshape_fn_out(sae.run_time_activation_norm_fn_out(y), sae.d_head)
    return y, aux, _Step(sae, x, w_enc, b_enc, norms if weighted else None, codes)


@torch.no_grad()
def _codes(sae: Any, x: Tensor) -> Tensor:
    """The codes that SAELens chooses of the k largest: others would be as good, but torch.topk's are its own."""
    pre = x @ sae.W_enc + sae.b_enc
    if sae.cfg.rescale_acts_by_decoder_norm:
        pre = pre * sae.W_dec.norm(dim=-1)
    codes: Tensor = sae.activation_fn(pre)
    return codes.to_dense() if codes.is_sparse else codes


def _aux_losses(sae: Any, step: TrainStepInput, aux: Aux, processed: Tensor, sae_out: Tensor) -> dict[str, Tensor]:
    """The losses of ``sae.calculate_aux_loss``."""
    if isinstance(sae, sae_lens.StandardTrainingSAE):
        return {"l1_loss": step.coefficients["l1"] * aux.l1}
    if isinstance(sae, jumprelu_sae.JumpReLUTrainingSAE):
        losses = {"l0_loss": step.coefficients["l0"] * aux.l0}
        if sae.cfg.pre_act_loss_coefficient is not None:
            losses["pre_act_loss"] = _pre_act_loss(sae, step.dead_neuron_mask, processed)
        return losses
    loss = _revival_loss(sae, step.sae_in - sae_out, step.dead_neuron_mask, processed)
    return {"auxiliary_reconstruction_loss": loss}


def _dead_columns(sae: Any, mask: Tensor | None, processed: Tensor) -> tuple[Tensor, Tensor] | None:
    """Which neurons are dead, as indices, and their pre-activations; None if none is. Waits for the GPU, as SAELens."""
    if mask is None or not len(dead := mask.nonzero().squeeze(1)):
        return None
    return dead, processed @ sae.W_enc.t()[dead].t() + sae.b_enc[dead]


def _pre_act_loss(sae: Any, mask: Tensor | None, processed: Tensor) -> Tensor:
    """Anthropic's pre-activation loss, of dead neurons."""
    found = _dead_columns(sae, mask, processed)
    if found is None:
        return processed.new_tensor(0.0)
    dead, pre = found
    below = (sae.threshold.to(pre.dtype)[dead] - pre).relu() * sae.W_dec[dead].norm(dim=1)
    return sae.cfg.pre_act_loss_coefficient * below.sum(dim=-1).mean()  # type: ignore[no-any-return]


def _revival_loss(sae: Any, residual: Tensor, mask: Tensor | None, processed: Tensor) -> Tensor:
    """The loss of TopK that lets dead neurons reconstruct what is missing (arXiv 2406.04093, appendix A.2)."""
    found = _dead_columns(sae, mask, processed)
    if found is None:
        return residual.new_tensor(0.0)
    dead, pre = found
    w_dec = sae.W_dec[dead]
    if sae.cfg.rescale_acts_by_decoder_norm:
        pre = pre * w_dec.norm(dim=-1)
    most = residual.shape[-1] // 2
    values, which = pre.topk(min(most, len(dead)), sorted=False)
    acts = torch.zeros_like(pre).scatter(-1, which, values)
    missed = topk_sae.act_times_W_dec(acts, w_dec, sae.cfg.rescale_acts_by_decoder_norm) - residual.detach()
    return sae.cfg.aux_loss_coefficient * min(len(dead) / most, 1.0) * missed.pow(2).sum(dim=-1).mean()  # type: ignore[no-any-return]


class _Step:
    """What the encoder read in a training step, for dense codes and pre-activations.

    ``norms``: of the decoder's rows, by which the weight is multiplied and codes are not. ``codes``: of ``_codes``.
    """

    def __init__(
        self, sae: Any, x: Tensor, w_enc: Tensor, b_enc: Tensor, norms: Tensor | None, codes: Tensor | None
    ) -> None:
        self.x, self.w_enc, self.b_enc, self.norms, self.codes = x, w_enc, b_enc, norms, codes
        if isinstance(sae, _SparseTraining):
            self.b_enc = b_enc.clone()
            self.threshold = sae.threshold.clone() if hasattr(sae, "threshold") else None
            self.bandwidth = getattr(sae, "bandwidth", 0.0)
        kind = x.device.type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        # as SAELens' sum of the product and the bias
        self.dtype = torch.promote_types(w_enc.dtype, b_enc.dtype)

    def part(self, which: int) -> Tensor:
        """The codes, 0, or the pre-activations, 1, with their gradient."""
        kind, dtype, enabled = self._autocast
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            pre = self.x @ self.w_enc.t() + self.b_enc
            if self.norms is not None:
                pre = pre / self.norms
            if which == 1:
                return pre
            if self.threshold is None:
                return pre.relu() if self.codes is None else torch.where(self.codes != 0, pre, 0)
            level = self.threshold.to(pre.dtype)
            return jumprelu_sae.JumpReLU.apply(pre, level, self.bandwidth, False)  # type: ignore[no-any-return]


class _Later(Tensor):
    """A tensor [..., N] of a ``_Step``, computed when an operator reads it. Sums of what fired are known before.

    ``which``: 0 for codes, 1 for pre-activations. ``kind``: None, or bool or float32 of codes that are not 0.
    ``counts``: int64 [N], how many tokens fire each neuron.
    """

    step: _Step
    which: int
    kind: torch.dtype | None
    counts: Tensor | None

    @classmethod
    def of(cls, step: _Step, which: int, counts: Tensor | None, kind: torch.dtype | None = None) -> _Later:
        """Such a tensor."""
        shape = (*step.x.shape[:-1], len(step.w_enc))
        made: Any = cls._make_wrapper_subclass(cls, shape, dtype=kind or step.dtype, device=step.x.device)
        made.step, made.which, made.counts, made.kind = step, which, counts, kind
        return made  # type: ignore[no-any-return]

    def dense(self) -> Tensor:
        """The tensor."""
        made = self.step.part(self.which)
        return made if self.kind is None else made.bool().to(self.kind)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, own = kwargs or {}, args[0] if args else None
        if isinstance(own, cls):
            if function in _PLAIN:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **kwargs)
            if own.counts is not None:
                if function is Tensor.bool:
                    return cls.of(own.step, own.which, own.counts, torch.bool)
                if function is Tensor.float and own.kind is not None:
                    return cls.of(own.step, own.which, own.counts, torch.float32)
                if function is Tensor.sum and own.kind is not None and own.dim() == 2 and not kwargs:
                    if args[1:] in ((0,), (-2,)):
                        return own.counts.to(torch.int64 if own.kind == torch.bool else own.kind, copy=True)
        name = getattr(function, "__name__", "")
        if isinstance(own, cls) and name.endswith("_") and not name.startswith("_"):
            what = "feature_acts and hidden_pre are computed when they are read"
            raise NotImplementedError(f"{what}, got {name} of one in place: clone() it first")
        args, kwargs = pytree.tree_map_only(cls, cls.dense, (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.dense().detach(), (args, kwargs or {}))
        return function(*args, **kwargs)


# what is known without computing
_PLAIN = (
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.__len__),
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")),
)
