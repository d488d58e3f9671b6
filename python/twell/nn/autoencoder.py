"""``twell.nn.SparseAutoencoder``: sparse autoencoders and transcoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell.base.activation import RELU, largest_of_each
from twell.base.arguments import require, require_choice, require_integer, require_number, require_positive
from twell.call import functional
from twell.call.choice import Selection, hidden_of
from twell.call.execution import Aux, Extra
from twell.call.functional import Strategy
from twell.choose import cards
from twell.choose.explanation import Choice
from twell.choose.plan import Facts, Route, plan, routed
from twell.choose.site import AutoStrategy, tokens_of
from twell.nn import down_layout
from twell.nn.float8 import moving
from twell.nn.settings import Configured, name_of
from twell.ops import hybrid
from twell.ops.calls import How
from twell.ops.operands import Layer
from twell.runtime import modes
from twell.runtime.log import info_once, warn_once

Codes = Literal["relu", "jumprelu", "topk", "batchtopk"]
_CODES = ("relu", "jumprelu", "topk", "batchtopk")


class SparseAutoencoder(nn.Module):
    """``a W_dec + b_dec`` for x [..., d_in], of the codes ``a = activation((x - b_dec) W_enc + b_enc)`` [..., d_sae].

    Parameters, with the names and shapes of SAELens: ``W_enc`` [d_in, d_sae], ``W_dec`` [d_sae, d_in], ``b_enc``
    [d_sae], ``b_dec`` [d_in]; with ``skip`` also ``W_skip`` [d_in, d_in]: y gets x W_skip^T. Rows of
    ``W_dec`` begin with norm 1 and random directions, ``W_enc`` as its transpose, a view of [d_sae, d_in] rows, which
    the kernels read in place; safetensors wants it ``.contiguous()``.

    Args:
        activation: "relu"; "jumprelu", the pre-activation where it is above ``threshold``, a float32 parameter [d_sae]
            that starts at the given value; "topk", ReLU of the ``k`` largest of each token; "batchtopk", ReLU of the
            int(k tokens) largest of the call. With "batchtopk" the least code of each call in ``train`` mode moves the
            buffer ``threshold``, float32 0-d, by ``threshold_rate`` of the way, from 0; in ``eval`` mode codes are
            what is above it (arXiv 2412.06410).
        bandwidth: of "jumprelu": the threshold gets the straight-through gradient of arXiv 2407.14435, also from
            ``aux.l0``. A threshold below 0 counts as 0 and keeps its gradient.
        apply_b_dec_to_input: whether ``b_dec`` is subtracted from x, in its dtype. Transcoders do not.
        strategy: as in ``twell.sparse_ffn``; "auto" is an ``AutoStrategy`` of the module's own.

    In ``train`` mode a call counts who fires, in DDP on any rank: ``tokens_since_fired``, int64 [d_sae], in the state
    dict, and 0 where that has none. Casts leave ``threshold`` float32. Raises TypeError or ValueError for other values.
    """

    # where users find it, pickles included
    __module__ = "twell.nn"

    threshold: Tensor | None
    tokens_since_fired: Tensor

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        *,
        activation: Codes = "relu",
        k: float | None = None,
        threshold: float = 0.01,
        bandwidth: float = 0.05,
        threshold_rate: float = 0.01,
        skip: bool = False,
        apply_b_dec_to_input: bool = True,
        strategy: Strategy | AutoStrategy = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("d_in", d_in), ("d_sae", d_sae)):
            require_integer(name, size, 1)
        for name, flag in (("skip", skip), ("apply_b_dec_to_input", apply_b_dec_to_input)):
            require(name, flag, bool, "True or False")
        require_choice("activation", activation, _CODES)
        require_number("threshold", threshold, 0)
        require_positive("bandwidth", bandwidth)
        require_positive("threshold_rate", threshold_rate, 1)
        _require_k(k, activation, d_sae)
        self.d_in, self.d_sae = d_in, d_sae
        self.activation, self.bandwidth, self.threshold_rate = activation, bandwidth, threshold_rate
        # NumPy's, too
        self.k = int(k) if k is not None and activation == "topk" else k
        self.apply_b_dec_to_input = apply_b_dec_to_input
        self.strategy = strategy
        self._auto = AutoStrategy()
        self._first_threshold = threshold

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*sizes, device=device, dtype=dtype))

        self.W_enc = nn.Parameter(torch.empty(d_sae, d_in, device=device, dtype=dtype).t())
        self.W_dec = parameter(d_sae, d_in)
        self.b_enc, self.b_dec = parameter(d_sae), parameter(d_in)
        self.W_skip = parameter(d_in, d_in) if skip else None
        if activation == "jumprelu":
            self.threshold = nn.Parameter(torch.empty(d_sae, device=device, dtype=torch.float32))
        else:
            moving = torch.empty((), device=device, dtype=torch.float32) if activation == "batchtopk" else None
            self.register_buffer("threshold", moving)
        self.register_buffer("tokens_since_fired", torch.zeros(d_sae, device=device, dtype=torch.int64))
        # load_state_dict(assign=True) replaces rows with contiguous tensors
        self.register_load_state_dict_post_hook(_keep_rows)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights again; biases, the skip product and figures start at 0, thresholds where they started."""
        nn.init.normal_(self.W_dec)
        self.normalize_decoder_()
        self.W_enc.copy_(self.W_dec.t())
        for zero in (self.b_enc, self.b_dec, self.W_skip, self.tokens_since_fired):
            if zero is not None:
                zero.zero_()
        if self.threshold is not None:
            self.threshold.fill_(self._first_threshold if self.activation == "jumprelu" else 0)

    @property
    def strategy(self) -> Strategy | AutoStrategy:
        """How calls run, as in ``twell.sparse_ffn``; may be set at any time."""
        return self._strategy

    @strategy.setter
    def strategy(self, value: Strategy | AutoStrategy) -> None:
        routed(Facts(strategy=name_of(value)))
        self._strategy = value

    screen = Configured.screen

    def _site(self) -> AutoStrategy:
        return self._strategy if isinstance(self._strategy, AutoStrategy) else self._auto

    @property
    def invariant(self) -> bool:
        """Always False, as thresholds and choices that depend on a batch have no invariant kernels."""
        return False

    @invariant.setter
    def invariant(self, value: bool) -> None:
        if value:
            raise NotImplementedError(f"invariant must be False for a SparseAutoencoder, got {value!r}")

    def extra_repr(self) -> str:
        of_kind = {"jumprelu": f", bandwidth={self.bandwidth}", "relu": ""}.get(self.activation, f", k={self.k}")
        flags = "" if self.W_skip is None else ", skip=True"
        flags += "" if self.apply_b_dec_to_input else ", apply_b_dec_to_input=False"
        return f"{self.d_in}, {self.d_sae}, activation={self.activation!r}{of_kind}{flags}, strategy={self.strategy!r}"

    @overload
    def forward(self, x: Tensor, return_aux: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, return_aux: Literal[True]) -> tuple[Tensor, Aux]: ...
    def forward(self, x: Tensor, return_aux: bool = False) -> Tensor | tuple[Tensor, Aux]:
        """x [..., d_in] -> y [..., d_in], with ``Aux(l1, l0)`` of the codes, per token, if asked for.

        Raises TypeError for another dtype than the parameters' without autocast, ValueError for another size; so do
        ``encode`` and ``decode``.
        """
        centred = self._centred(x)
        why = self._why_dense(x)
        # a recomputation counts no token again
        counting = self.training and (modes.compiling() or not modes.in_backward())
        fired = torch.zeros_like(self.tokens_since_fired) if counting else None
        moves = counting and self.activation == "batchtopk"
        least = torch.full_like(self.threshold, torch.inf) if moves else None  # type: ignore[arg-type]
        if why and self._strategy != "dense" and not modes.compiling():
            say = warn_once if x.is_cuda else info_once
            say(f"a SparseAutoencoder runs dense: {why}")
        site = "dense" if why else self._site() if self._strategy == "auto" else self._strategy
        y, aux = self._run(centred, site, fired, least)
        if fired is not None:
            self._note(fired, tokens_of(x), least)
        if self.W_skip is not None:
            y = y + F.linear(x, self.W_skip)
        return (y, aux) if return_aux else y

    def _why_dense(self, values: Tensor) -> str:
        """Why no call on values of this dtype runs kernels, in autograd's mode of now; "" if calls may, or raise."""
        asked, on = name_of(self._strategy), values.device
        facts = Facts(strategy=asked, n=self.d_sae, k=self.d_in, device=on.type, sliced=True)
        dtype, imposed = modes.product_dtype(values.dtype, on.type), cards.imposed(on.type, on.index)
        answer = plan(facts._replace(dtype=dtype, imposed=imposed, training=torch.is_grad_enabled()))
        if asked == "auto" and not isinstance(answer, Route):
            # sizes and dtypes that the kernels do not take
            return answer.shown.removeprefix("calls raise: ")
        return answer.reason if isinstance(answer, Route) and answer.strategy == "dense" else ""

    def encode(self, x: Tensor) -> Tensor:
        """The codes [..., d_sae] of x [..., d_in], dense, by PyTorch's operators; moves and counts nothing."""
        pre = F.linear(self._centred(x), self.W_enc.t(), self.b_enc)
        if self.activation == "jumprelu":
            return hidden_of(pre, Selection(self._level(), self.bandwidth))[0]
        if self.activation == "batchtopk" and self.training:
            return hidden_of(pre, Selection(most=int((self.k or 0) * tokens_of(pre))))[0]
        if self.activation == "batchtopk":
            return torch.where(pre <= self._level().to(pre.dtype), 0, pre)
        return largest_of_each(pre.relu(), int(self.k or 0)) if self.activation == "topk" else pre.relu()

    def decode(self, codes: Tensor) -> Tensor:
        """``codes W_dec + b_dec`` [..., d_in] of dense codes [..., d_sae]. Skips nothing."""
        self._require("codes", codes, self.d_sae)
        return F.linear(codes, self.W_dec.t(), self.b_dec)

    def _require(self, name: str, values: Tensor, size: int) -> None:
        """Raise unless these are [..., size], in the dtype of the parameters or one that autocast makes the same."""
        require(name, values, Tensor, "a tensor")
        if values.shape[-1:] != (size,):
            raise ValueError(f"{name} must be [..., {size}], got {list(values.shape)}")
        found, expected = values.dtype, self.W_enc.dtype
        cast = [modes.product_dtype(dtype, values.device.type) for dtype in (found, expected)]
        if found != expected and (cast[0] != cast[1] or not found.is_floating_point):
            raise TypeError(f"{name} must have the dtype of the parameters, {expected}, or autocast, got {found}")

    def _centred(self, x: Tensor) -> Tensor:
        self._require("x", x, self.d_in)
        # PyTorch rounds the product of a view in three dimensions before it adds the bias: other codes may be chosen
        return (x - self.b_dec if self.apply_b_dec_to_input else x).contiguous()

    def _level(self) -> Tensor:
        """The threshold of each neuron, at least 0, with its gradient."""
        assert self.threshold is not None
        if self.activation == "batchtopk":
            return self.threshold.expand(self.d_sae)
        # a clamp would take the gradient of those below 0, which could not rise again
        level = torch.where(self.threshold < 0, self.threshold - self.threshold.detach(), self.threshold)
        # kernels take finite ones
        kinds = level.dtype, modes.product_dtype(self.W_enc.dtype, level.device.type)
        return level.clamp(max=min(torch.finfo(each).max for each in kinds))

    def _run(self, centred: Tensor, site: Any, fired: Tensor | None, least: Tensor | None) -> tuple[Tensor, Aux]:
        """The result by ``twell.sparse_ffn``; who fires is added to ``fired``; ``least``: see ``Selection``."""
        weights = self.W_enc.t(), self.W_dec.t()
        if self.activation == "batchtopk" and self.training:
            layer = Layer(centred, weights[0], None, weights[1], self.b_enc, None, self.b_dec)
            choice = Selection(most=int((self.k or 0) * tokens_of(centred)), least=least)
            extra, how = Extra(None, choice, fired), How(RELU, site)
            return functional.run(functional.sparse_ffn, layer, how, None, True, extra)  # type: ignore[return-value]
        options: dict[str, Any] = {"activation": self.activation, "k": self.k}
        if self.activation in ("jumprelu", "batchtopk"):
            level = self._level()
            options = {"activation": "fatrelu", "threshold": level if level.requires_grad else level.detach()}
            options["bandwidth"] = self.bandwidth if level.requires_grad else None
        options |= {"b_up": self.b_enc, "b_down": self.b_dec, "strategy": site, "return_aux": True, "counts": fired}
        return functional.sparse_ffn(centred, *weights, **options)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _note(self, fired: Tensor, tokens: Any, least: Tensor | None) -> None:
        """Count the tokens of a call, and move the threshold of "batchtopk" towards ``least``, if there is one.

        In a forward pass of DDP tokens are those of all ranks, which send one message, and ``least`` is their mean.
        """
        if (ddp := modes.data_parallel()) is not None and self._is_within_ddp():
            found = fired.new_zeros((), dtype=torch.float64) if least is None else least.double()
            known = found.isfinite()
            own = torch.stack([torch.full_like(found, tokens), torch.where(known, found, 0), known.double()])
            message = torch.cat([fired.double(), own])
            torch.distributed.all_reduce(message, group=ddp.process_group)
            fired, tokens = message[:-3], message[-3].long()
            # without one it is NaN
            least = None if least is None else (message[-2] / message[-1]).to(least.dtype)
        self.tokens_since_fired.add_(tokens).masked_fill_(fired > 0, 0)
        if least is not None:
            assert self.threshold is not None
            moved = self.threshold.lerp(least, self.threshold_rate)
            self.threshold.copy_(torch.where(least.isfinite(), moved, self.threshold))

    # tracing need not follow a walk through a model
    @modes.constant
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _is_within_ddp(self) -> bool:
        """Whether the model that DDP runs now holds this module, and does not call it as another one's hook."""
        return any(each is self for each in modes.data_parallel().module.modules())

    @torch.no_grad()
    def normalize_decoder_(self) -> None:
        """Divide each row of the decoder by its norm, in place; rows of zeros stay. For after each optimizer step."""
        # in float32 or wider
        dtype = torch.promote_types(self.W_dec.dtype, torch.float32)
        norms = torch.linalg.vector_norm(self.W_dec, dim=1, keepdim=True, dtype=dtype)
        self.W_dec.div_(norms.clamp(min=torch.finfo(dtype).tiny))

    def dead(self, after_tokens: int) -> Tensor:
        """Which neurons fired for none of the last ``after_tokens`` tokens of ``train`` mode: bool [d_sae]."""
        require_integer("after_tokens", after_tokens, 1)
        return self.tokens_since_fired >= after_tokens

    def auxiliary_loss(self, x: Tensor, y: Tensor, dead: Tensor, *, target: Tensor | None = None) -> Tensor:
        """AuxK: how far neurons that are ``dead``, bool [d_sae], are from reconstructing what y lacks; 0-d.

        The mean over tokens of ``||e - z W_dec||^2 min(1, D / k)``, with e = target - y, which gets no gradient, D dead
        neurons, and z the ``min(k, D)`` largest pre-activations of dead neurons of a token, negative ones, too; k is
        d_in // 2, and ``target`` x if not given. Source: Gao et al. 2024 (arXiv 2406.04093), appendix A.2, as SAELens
        has it: the loss is not divided by the variance, z has no ReLU, and few dead neurons weigh less.

        Only columns of dead neurons are computed. Waits for the GPU, once. 0 without a gradient if none is dead.
        """
        require("dead", dead, Tensor, "a tensor")
        if dead.shape != (self.d_sae,) or dead.dtype != torch.bool:
            raise ValueError(f"dead must be bool [{self.d_sae}], got {dead.dtype} {list(dead.shape)}")
        self._require("x", x, self.d_in)
        target = x if target is None else target
        for name, values in (("y", y), ("target", target)):
            require(name, values, Tensor, "a tensor")
            if values.shape != x.shape:
                raise ValueError(f"{name} must be {list(x.shape)}, got {list(values.shape)}")
        which = dead.nonzero().squeeze(1)
        most = max(self.d_in // 2, 1)
        if not len(which):
            return y.new_zeros(())
        pre = F.linear(self._centred(x), self.W_enc.t()[which], self.b_enc[which])
        chosen = largest_of_each(pre, min(most, len(which)))
        missed = F.linear(chosen, self.W_dec[which].t()) - (target - y).detach()
        squares = missed.to(torch.promote_types(missed.dtype, torch.float32)).square()
        return squares.sum() * (min(1.0, len(which) / most) / max(tokens_of(x), 1))

    def explain(self, name: str = "") -> list[Choice]:
        """The rows of ``twell.explain`` for this layer."""
        rows = []
        named = str(name_of(self._strategy))
        most = hybrid.most_of_each(self.d_sae)
        for kind in ("inference", "training"):
            with torch.set_grad_enabled(kind == "training"):
                why = self._why_dense(self.W_enc)
            reason = "not called yet" if named == "auto" else "it was named"
            if kind == "training" and not why and (self.k or 0) > most:
                why = f"k is above {most}" if named == "auto" else ""
                reason = f"calls raise: k is above {most}"
            rows.append(Choice(name, kind, "any", "", "dense" if why else named, why or reason))
        measured = self._site().explain(name) if any(row.strategy == "auto" for row in rows) else []
        return [row._replace(layout="rows") for row in measured or rows]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        threshold = self.threshold
        own = (threshold, None if threshold is None or not threshold.is_leaf else threshold.grad)
        return super()._apply(moving(fn, own), recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *how: Any) -> None:
        """As torch, of state dicts without ``tokens_since_fired``, too."""
        state_dict.setdefault(f"{prefix}tokens_since_fired", torch.zeros_like(self.tokens_since_fired))
        super()._load_from_state_dict(state_dict, prefix, *how)


def _keep_rows(module: SparseAutoencoder, incompatible_keys: Any) -> None:
    down_layout.store(module.W_enc, rows=True)
    down_layout.store(module.W_dec, rows=False)


def _require_k(k: Any, activation: str, most: int) -> None:
    """Raise TypeError or ValueError unless ``k`` goes with ``activation``."""
    if activation == "topk":
        require_integer("k", k, 1)
    elif activation == "batchtopk":
        require_positive("k", k)
    elif k is not None:
        raise ValueError(f'k must be None unless activation is "topk" or "batchtopk", got {k!r}')
    if k is not None and k > most:
        raise ValueError(f"k must be at most d_sae = {most}, got {k}")
