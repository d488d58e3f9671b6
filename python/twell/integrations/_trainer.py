"""``SparsityCallback``: the training recipe for the Trainer of transformers."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from twell import recipe
from twell.base.arguments import require_flag, require_integer, require_number, require_positive
from twell.recipe import SparsityTracker, trained_layers
from twell.runtime.log import logger

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import has_length
except ImportError as error:
    raise ImportError("SparsityCallback is for the Trainer of transformers: pip install 'twell[train]'") from error

# The paper's coefficient.
_PAPERS = 2e-5
# Passes in training mode between two steps of a Trainer, at the most: after these its run has ended.
_MOST_PASSES = 16
# A miss of the target by more than this factor is worth a warning.
_MISSED = 1.1
_TOO_MANY = (
    "More steps, a larger learning rate or layers that are not frozen help; a run that stops early does not get there"
)
_TOO_FEW = "The term pressed too hard: a smaller learning rate or more steps help"


class SparsityCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Adds the L1 term to the loss of a Trainer, tracks the model's sparsity and revives dead neurons.

    ::

        model = sparsify(model)
        args = TrainingArguments(..., learning_rate=1e-3)
        Trainer(model, args, train_dataset=data, callbacks=[SparsityCallback(nnz=30)]).train()

    ``nnz`` is a number of non-zeros per token to train to. With an optimizer such as Adam learning rate * steps *
    sqrt(K) should be above 6 times the root mean square of the gates' weights, better 20 times: Trainer's default of
    5e-5 is mostly too small for some hundreds of steps. A warning says when the L1 term has come to its most and, as
    training ends, names a miss by more than a tenth. Without ``nnz`` there is a ``coefficient``.

    The model's forward pass must return a loss. In training mode the callback adds to it the term of
    ``recipe.TargetSparsity`` or ``coefficient`` times the warm-up's factor times ``recipe.l1_term``. A step's gradient
    is then that of Trainer's loss plus the mean of the term over micro-batches and ranks, however Trainer weighs the
    former. The loss that Trainer logs includes the term; evaluation does not.

    Logs of training steps, and ``state.log_history``, gain ``sparsity_l0`` and ``sparsity_l1``, the means over layers
    since the last log, ``sparsity_dead``, a share of the neurons, and ``sparsity_coefficient``, the current one; with
    ``moving_threshold`` also ``sparsity_threshold``. ``sparsity_layers`` of ``state.log_history`` is the L0 of each
    layer. Trainer calls the reporters of ``report_to``, as TensorBoard's, before the callbacks that it is given: for
    these figures there, put this one first, ``trainer.callback_handler.callbacks.insert(0, SparsityCallback(nnz=30))``.
    A resumed run continues the warm-up and the target from its checkpoint, in whichever folder, and observes its first
    step for dead neurons.

    A loss outside the model (``compute_loss_func``, an overridden ``compute_loss`` that does not use the model's loss,
    label smoothing) is an error, at the latest when a step ends in which the term had no gradient: call
    ``recipe.record_aux``, add ``recipe.l1_term`` there, and set ``coefficient`` to 0 here, which leaves the loss alone.
    A ``compute_loss`` that weighs the model's loss weighs the term, too, and so does one that leaves out Trainer's
    division by micro-batches. After Ctrl-C or an error the model keeps the hooks, until its next training run begins
    with such a callback or an error says that they are there.

    Args:
        coefficient: of the L1 term; None: 2e-5, the paper's, for models of 0.5 to 2 B parameters. Smaller models have
            fewer neurons to sum over and need more.
        warmup_steps: optimizer steps, as in ``recipe.l1_warmup``.
        nnz: the mean over layers of non-zeros per token to train to, by ``recipe.TargetSparsity`` over all steps of
            Trainer, in place of the two arguments above. Layers with "relu2" or "drelu" get L1 of the gate.
        moving_threshold: with ``nnz``: layers with "relu" or "fatrelu" get FATReLU, whose threshold
            ``recipe.TargetThreshold`` moves. It settles as training ends. Checkpoints name the threshold of their step.
            Files of an adapter have no place for it: save the model's configuration with them, or merge the adapter.
        attention_mask: leave padding out of the L1 term and of the non-zeros of ``nnz``: tokens at which the batch's
            ``attention_mask`` is 0, as ``recipe.l1_term`` does and at its cost. A batch without a mask has no padding.
            False: padding counts. Figures in logs count it, either way.
        reinitialize: fraction of ``recipe.reinitialize_dead``, which then runs after each optimizer step on layers
            whose gate is trained, with noise by Trainer's ``seed``; 0: never. The paper has 0.1.
        every: as in ``recipe.SparsityTracker``.

    Runs with DDP, FSDP2, torch_compile, bf16 and fp16, and with non-reentrant gradient checkpointing. Raises ValueError
    as training begins if the model has no twell layers; with nn.DataParallel (use torchrun); with label smoothing; with
    ``reinitialize`` under DeepSpeed, whose own copies of the weights would undo it; with ``attention_mask`` for an
    encoder-decoder, whose halves have different tokens; with ``nnz`` under load_best_model_at_end, which goes back to a
    step before the target; with ``moving_threshold`` under ``save_strategy="best"``, whose files name no threshold; for
    a second SparsityCallback; and for a checkpoint without a target or of another one: another ``nnz`` or number of
    steps. In a step whose layers have other tokens than the mask ``attention_mask`` raises it, too.
    """

    def __init__(
        self,
        coefficient: float | None = None,
        *,
        warmup_steps: int = 0,
        nnz: float | None = None,
        moving_threshold: bool = False,
        attention_mask: bool = False,
        reinitialize: float = 0.0,
        every: int = 100,
    ) -> None:
        if coefficient is not None:
            require_number("coefficient", coefficient, 0)
        require_integer("warmup_steps", warmup_steps, 0)
        if nnz is not None:
            require_positive("nnz", nnz)
        require_flag("moving_threshold", moving_threshold)
        if nnz is None and moving_threshold:
            raise ValueError("SparsityCallback: moving_threshold=True needs nnz, the non-zeros per token to train to")
        if nnz is not None and (coefficient, warmup_steps) != (None, 0):
            raise ValueError(
                "SparsityCallback: coefficient and warm-up must be left out with nnz, which finds a coefficient for "
                f"each step, got {coefficient} and {warmup_steps}"
            )
        require_flag("attention_mask", attention_mask)
        require_number("reinitialize", reinitialize, 0, 1)
        require_integer("every", every, 1 if reinitialize else 0)
        self.coefficient, self.nnz, self.moving_threshold = coefficient, nnz, moving_threshold
        self.warmup_steps, self.attention_mask = warmup_steps, attention_mask
        self.reinitialize, self.every = reinitialize, every
        self.tracker: SparsityTracker | None = None
        self.target: recipe.TargetSparsity | recipe.TargetThreshold | None = None
        self._model: nn.Module | None = None
        # the state of the Trainer of this run
        self._state: Any = None
        self._handles: list[Any] = []
        self._step = 0
        self._watching = False
        # first step of the epoch and how many of its steps a resumed run skips; None before the first epoch
        self._epoch: tuple[int, int] | None = None
        # micro-batches of this step, and Trainer's factor on the loss
        self._micro_batches = self._scale = 1
        # passes in training mode since Trainer was last heard of, and whether a term of this step has had a gradient
        self._passes, self._arrived = 0, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the layers, hook the model."""
        self._detach()
        model: nn.Module = kwargs["model"]
        recipe.layers(model)
        for hook in list(model._forward_hooks.values()):
            owner = getattr(getattr(hook, "function", None), "__self__", None)
            if isinstance(owner, SparsityCallback):
                # left by a run that ended in an exception or Ctrl-C, without on_train_end
                second = owner._state is state
                owner._detach()
                if second:
                    raise ValueError("SparsityCallback: expected one for a Trainer, got a second")
        halves = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        wrong = {
            f"expected one process per GPU, got nn.DataParallel on {args.n_gpu} GPUs, whose copies of the model record "
            "nothing; start with torchrun, or set CUDA_VISIBLE_DEVICES to one GPU": args.n_gpu > 1,
            f"label_smoothing_factor must be 0, got {args.label_smoothing_factor}: Trainer then computes the loss "
            "outside the model; override compute_loss and add twell.recipe.l1_term there, with coefficient=0 here": (
                args.label_smoothing_factor and self._adds_term
            ),
            "load_best_model_at_end must be off with nnz: Trainer would go back to weights from before the target was "
            "reached, and with moving_threshold to those of another threshold": (
                self.nnz is not None and args.load_best_model_at_end
            ),
            'save_strategy must not be "best" with moving_threshold: Trainer decides to save too late for the '
            "threshold to be named": self.moving_threshold and args.save_strategy == "best",
            "reinitialize must be 0 under DeepSpeed, which keeps copies of weights": (
                self.reinitialize and args.deepspeed
            ),
            "attention_mask must be off for an encoder-decoder, whose decoder has other tokens, got "
            f"{type(model).__name__}: padding counts then": self.attention_mask and halves,
        }
        if said := next((said for said, is_so in wrong.items() if is_so), ""):
            raise ValueError(f"SparsityCallback: {said}")
        self.tracker = SparsityTracker(model, every=self.every)
        if self.nnz is None and self._adds_term:
            recipe.record_aux(model, inputs=self.attention_mask)
        # Trainer has read it from the checkpoint to resume from, and replaces it in new checkpoints
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        # a list if there are two callbacks; the second one raises below
        saved = saved[0] if isinstance(saved, list) else saved
        if self.nnz is None and state.global_step and saved.get("target") is not None:
            raise ValueError(
                f"SparsityCallback: the checkpoint of step {state.global_step} must have no target without nnz, got "
                "one: resume with its nnz and moving_threshold, or begin a new run from its weights"
            )
        if self.nnz is not None:
            self.target = self._target(model, self.nnz, state.max_steps)
            if state.global_step:
                self._resume(saved.get("target"), state.global_step)
        self._model, self._state, self._epoch = model, state, None
        self._scale, self._passes, self._arrived = _loss_scale(args, model), 0, False
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._before), with_kwargs=True),
            model.register_forward_hook(_Hook(self._after), with_kwargs=True),
        ]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was; warn of a target that was missed."""
        if self.target is not None and self.nnz is not None and state.is_world_process_zero:
            fired = self.target.read()["non_zeros"]
            if not self.nnz / _MISSED <= fired <= self.nnz * _MISSED:
                advice = _TOO_MANY if fired > self.nnz else _TOO_FEW
                logger.warning(
                    "training ended with %.4g non-zeros per token in its last step, where nnz is %g. %s. Steps of few "
                    "tokens scatter: twell.analyze counts more",
                    *(fired, self.nnz, advice),
                )
        self._detach()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the first step of the epoch."""
        skipped = 0
        loader: Any = kwargs.get("train_dataloader")
        if self._epoch is None and not args.ignore_data_skip and has_length(loader):
            skipped = state.global_step % max(math.ceil(len(loader) / args.gradient_accumulation_steps), 1)
        self._epoch = state.global_step, skipped

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the micro-batches of the step: the last step of an epoch may have fewer."""
        self._step, self._micro_batches = state.global_step, args.gradient_accumulation_steps
        self._passes, self._arrived = 0, False
        loader: Any = kwargs.get("train_dataloader")
        if has_length(loader) and self._epoch is not None:
            begun, skipped = self._epoch
            done = (state.global_step - begun + skipped) * args.gradient_accumulation_steps
            self._micro_batches = max(min(self._micro_batches, len(loader) - done), 1)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the run goes on."""
        self._passes = 0

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Steer towards the target, and draw dead neurons towards their initialisation."""
        if self._adds_term and not self._arrived:
            raise ValueError(
                f"SparsityCallback: the L1 term must have a gradient, got none in step {state.global_step}: the loss "
                "is computed outside the model (compute_loss_func, or an overridden compute_loss that leaves the "
                "model's loss out or calls a part of the model), or all layers are frozen. Add twell.recipe.l1_term to "
                "that loss, with coefficient=0 here"
            )
        if self.target is not None:
            self.target.update()
        if self.reinitialize and self.tracker is not None and self._model is not None:
            trained = trained_layers(self._model)
            dead = {name: mask for name, mask in self.tracker.dead().items() if name in trained}
            recipe.reinitialize_dead(self._model, dead, self.reinitialize, step=state.global_step, seed=args.seed)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the figures to the logs of a training step."""
        if self.tracker is None or logs is None or not {"loss", "learning_rate"} <= logs.keys():
            return
        stats = self.tracker.read()
        steered = {"coefficient": self._coefficient(self._step)} if self.target is None else self.target.read()
        steered.pop("non_zeros", None)
        figures = {f"sparsity_{name}": value for name, value in (stats.summary() | steered).items()}
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            of_layers = [None if row.l0 is None else round(row.l0, 3) for row in stats.layers]
            state.log_history[-1].update(figures, sparsity_layers=of_layers)

    def state(self) -> dict[str, Any]:
        """The entry in a checkpoint's trainer_state.json: arguments, and the target's state."""
        names = ("coefficient", "warmup_steps", "nnz", "moving_threshold", "attention_mask", "reinitialize", "every")
        return {
            "args": {name: getattr(self, name) for name in names},
            "attributes": {},
            "target": None if self.target is None else self.target.state_dict(),
        }

    @property
    def _adds_term(self) -> bool:
        return self.nnz is not None or self.coefficient != 0

    def _target(self, model: nn.Module, nnz: float, steps: int) -> recipe.TargetSparsity | recipe.TargetThreshold:
        if self.moving_threshold:
            recipe.record_aux(model, inputs=True)
            return recipe.TargetThreshold(model, nnz, steps)
        found = recipe.layers(model)
        of_gate = any(layer.activation in ("relu2", "drelu") for layer in found.values())
        if of_gate and any(layer.activation == "fatrelu" for layer in found.values()):
            raise ValueError(
                'SparsityCallback: nnz needs layers without FATReLU where others have "relu2" or "drelu": it steers '
                "gates above 0, of which a threshold silences some; sparsify the model with one activation"
            )
        recipe.record_aux(model, inputs=of_gate or self.attention_mask)
        return recipe.TargetSparsity(nnz, steps, of="gate" if of_gate else "hidden")

    def _resume(self, saved: Any, step: int) -> None:
        """Go on from a checkpoint's target."""
        assert self.target is not None
        if saved is None:
            raise ValueError(
                f"SparsityCallback: the checkpoint of step {step} must have a target, as nnz is {self.nnz:g}, got "
                "none: it is of a run without nnz; begin a new run from its weights"
            )
        try:
            self.target.load_state_dict(saved)
        except ValueError as error:
            raise ValueError(
                f"SparsityCallback: the checkpoint of step {step} must be of the same nnz, moving_threshold "
                f"and number of steps: {error}; begin a new run from its weights"
            ) from error

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.tracker is not None:
            self.tracker.close()
        if self._model is not None and self._adds_term:
            recipe.record_aux(self._model, False)
        if isinstance(self.target, recipe.TargetThreshold):
            try:
                self.target.settle()
            except RuntimeError as error:
                # somebody has set them meanwhile
                logger.warning("the thresholds of the layers stay as they are: %s", error)
        self.tracker = self.target = self._model = self._state = None

    def _coefficient(self, step: int) -> float:
        coefficient = _PAPERS if self.coefficient is None else self.coefficient
        return coefficient * recipe.l1_warmup(step, self.warmup_steps)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model."""
        assert self.tracker is not None
        if self._adds_term:
            # figures of passes without a loss, such as generated text
            recipe.clear_aux(model, skippable=True)
        self._watching = model.training and torch.is_grad_enabled()
        if not self._watching:
            return
        self._passes += 1
        if self._passes > _MOST_PASSES:
            self._detach()
            raise RuntimeError(
                f"SparsityCallback: expected a step of its Trainer within {_MOST_PASSES} forward passes in training "
                "mode, got none: its run was interrupted, and the L1 term has been in the loss of this one. The model "
                "is as it was before now; train again"
            )
        self.tracker.begin(self._step)

    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook of the model: its output with the L1 term in the loss."""
        if not self._watching:
            return output
        assert self.tracker is not None
        self.tracker.end()
        self._watching = False
        if not self._adds_term:
            return output
        mask = kwargs.get("attention_mask") if self.attention_mask else None
        options: dict[str, Any] = {"several": True, "attention_mask": mask}
        called = any(layer.aux is not None for layer in recipe.layers(model).values())
        if self.target is None:
            term = recipe.l1_term(model, **options)
            weight = self._coefficient(self._step)
        else:
            term, weight = self.target.term(model, **options), 1.0
        if term.requires_grad:
            term.register_hook(self._note)  # type: ignore[no-untyped-call]
        # a pass that skipped all layers has no gradient to arrive
        self._arrived |= not called
        if kwargs.get("num_items_in_batch") is not None:
            # the model has divided by the tokens of all micro-batches; otherwise Trainer divides by their number
            weight /= self._micro_batches * self._scale
        return _with_loss(output, lambda loss: loss + weight * term.to(loss.device))

    def _note(self, gradient: Tensor) -> None:
        """Hook of the term, in the backward pass."""
        self._arrived = True


class _Hook:
    """A hook of the model that does nothing in copies, such as an average of its weights."""

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self.function = function

    def __getstate__(self) -> dict[str, Any]:
        return {"function": None}

    # the function counts steps and writes attributes; the forward pass around which it runs is still compiled
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *arguments: Any) -> Any:
        return None if self.function is None else self.function(*arguments)


def _with_loss(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``output`` of a model of transformers with another loss."""
    loss = output.get("loss") if isinstance(output, dict) else output[0] if isinstance(output, tuple) else None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"SparsityCallback: the model must return its loss in training mode, got {type(output).__name__} without: "
            "add twell.recipe.l1_term to a loss outside the model (compute_loss_func or an overridden compute_loss), "
            "with coefficient=0 here"
        )
    if isinstance(output, tuple):
        return (change(loss), *output[1:])
    output["loss"] = change(loss)
    return output


def _loss_scale(args: Any, model: Any) -> int:
    """Trainer's factor on a loss that was divided by the tokens of all devices, which undoes DDP's average."""
    if not args.average_tokens_across_devices:
        return 1
    parallel = getattr(args, "parallelism_config", None)
    tensor_parallel = getattr(model, "_tp_size", None) or getattr(parallel, "tp_size", None) or 1
    return max(int(args.world_size) // int(tensor_parallel), 1)
