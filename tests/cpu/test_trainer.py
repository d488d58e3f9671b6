"""``SparsityCallback``: the gradient under Trainer, logs, resuming, two processes."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from twell import recipe
from twell.integrations._trainer import SparsityCallback
from twell.integrations.transformers import load
from twell.nn.layers import SparseGatedMLP

VOCABULARY, LENGTH = 32, 12

pytestmark = pytest.mark.usefixtures("seeded")


def llama(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        hidden_act="relu",
        # larger weights than usual: the term is as large as the cross-entropy
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        mlp = layer.mlp
        layer.mlp = SparseGatedMLP.from_linear(mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return model


def sequences(count: int, masked: bool = False) -> list[dict[str, Tensor]]:
    """Sequences that count upwards from a random start; ``masked``: with few or many labels."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        start = torch.randint(VOCABULARY, (1,), generator=generator)
        ids = (start + torch.arange(LENGTH)) % VOCABULARY
        labels = ids.clone()
        if masked:
            labels[: 3 * i % LENGTH] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "learning_rate": 0.0,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
    }
    return TrainingArguments(**{**defaults, **options})


def callback(**options: Any) -> SparsityCallback:
    return SparsityCallback(**{"coefficient": 0.1, "every": 2, **options})


class AfterSteps(TrainerCallback):  # type: ignore[misc]
    def __init__(self, function: Callable[[Any], object]) -> None:
        self.function = function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.function(kwargs["model"])


def interrupt(model: Any) -> None:
    raise KeyboardInterrupt


class Recording(Trainer):  # type: ignore[misc]
    """A Trainer that keeps each step's micro-batches and the optimizer's gradient."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[tuple[list[tuple[Any, Any]], list[Tensor]]] = []
        self.micro: list[tuple[Any, Any]] = []
        outer = self

        class Keep(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                grads = [p.grad.clone() for p in kwargs["model"].parameters()]
                outer.steps.append((outer.micro, grads))
                outer.micro = []

        self.add_callback(Keep())

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.micro.append(({name: t.clone() for name, t in inputs.items()}, num_items_in_batch))
        return super().training_step(model, inputs, num_items_in_batch)


def plain_gradient(model: Any, micro: list[tuple[Any, Any]], coefficient: float) -> list[Tensor]:
    """The gradient of a loop over the same micro-batches: cross-entropy plus the recipe's L1 term."""
    model.zero_grad()
    recipe.record_aux(model.train())
    for inputs, items in micro:
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].reshape(-1, VOCABULARY)
        labels = inputs["labels"][:, 1:].reshape(-1)
        if items is None:
            ce = F.cross_entropy(logits, labels) / len(micro)
        else:
            ce = F.cross_entropy(logits, labels, reduction="sum") / items
        (ce + coefficient / len(micro) * recipe.l1_term(model)).backward()
    return [p.grad.clone() for p in model.parameters()]


def assert_gradients(trainer: Recording, plain: Any, *coefficients: float, atol: float = 1e-6) -> None:
    """Compare each step's gradient with that of a plain loop; the last coefficient holds for all later steps."""
    for i, (micro, grads) in enumerate(trainer.steps):
        coefficient = coefficients[min(i, len(coefficients) - 1)]
        for got, expected in zip(grads, plain_gradient(plain, micro, coefficient), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize(("accumulation", "by_tokens"), [(1, True), (3, True), (3, False)])
def test_gradient_is_that_of_a_plain_loop(tmp_path: Path, accumulation: int, by_tokens: bool) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    # seven batches: the last step of the epoch has fewer micro-batches
    args = arguments(tmp_path, gradient_accumulation_steps=accumulation, num_train_epochs=2)
    data = sequences(14, masked=accumulation > 1)
    trainer = Recording(model, args, train_dataset=data, callbacks=[callback()])
    trainer.model_accepts_loss_kwargs = by_tokens
    trainer.train()
    assert [len(micro) for micro, _ in trainer.steps] == ([3, 3, 1] if accumulation == 3 else [1] * 7) * 2
    assert all((micro[0][1] is not None) == by_tokens for micro, _ in trainer.steps)
    assert_gradients(trainer, plain, 0.1)
    # the term is no rounding error
    without = plain_gradient(plain, trainer.steps[-1][0], 0.0)
    assert any((a - b).norm() > 0.1 * b.norm() for a, b in zip(trainer.steps[-1][1], without))


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ],
    ids=["checkpointing", "compiled"],
)
def test_gradient_under_trainers_options(tmp_path: Path, options: dict[str, Any]) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    spy, tokens = callback(every=1, warmup_steps=2), []
    count = AfterSteps(lambda _: tokens.append(spy.tracker.read().layers[0].tokens))  # type: ignore[union-attr]
    args = arguments(tmp_path, max_steps=3, **options)
    trainer = Recording(model, args, train_dataset=sequences(6), callbacks=[spy, count])
    trainer.train()
    assert tokens == [2 * LENGTH] * 3
    assert_gradients(trainer, plain, 0.0, 0.05, 0.1)


def test_logs_have_the_figures_of_layers(tmp_path: Path) -> None:
    class Reporter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            reported.append(logs.get("sparsity_l0"))

    model, own, reported, found = llama(), callback(), list[Any](), list[Any]()
    trainer = Trainer(model, arguments(tmp_path, max_steps=3), train_dataset=sequences(8), callbacks=[Reporter()])
    # as its help says
    trainer.callback_handler.callbacks.insert(0, own)
    trainer.add_callback(AfterSteps(lambda _: found.append(own.tracker.dead())))  # type: ignore[union-attr]
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert reported[:3] == [entry["sparsity_l0"] for entry in logs]
    for entry, dead in zip(logs, found, strict=True):
        assert sum(entry["sparsity_layers"]) / 2 == pytest.approx(entry["sparsity_l0"], abs=1e-3)
        assert 0 < min(entry["sparsity_layers"]) <= max(entry["sparsity_layers"]) <= 48
        assert sum(int(mask.sum()) for mask in dead.values()) / 96 == pytest.approx(entry["sparsity_dead"])
    # the model is as it was
    for layer in recipe.layers(model).values():
        assert not layer.record_aux
        assert not layer._forward_hooks
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_evaluation_has_no_penalty(tmp_path: Path) -> None:
    model, data = llama(), sequences(4)
    plain = copy.deepcopy(model)
    args = arguments(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=[callback(coefficient=10.0)])
    trainer.train()
    logs = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
    ids = torch.stack([each["input_ids"] for each in data])
    with torch.no_grad():
        expected = float(plain(input_ids=ids, labels=ids).loss)
    assert logs["eval_loss"] == pytest.approx(expected, rel=1e-4)
    assert logs["loss"] > 5 * expected


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_wrong_settings_and_models_are_refused(tmp_path: Path) -> None:
    def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"][:, :-1].reshape(-1, VOCABULARY)
        return F.cross_entropy(logits, labels[:, 1:].reshape(-1))

    def train(model: Any, own: SparsityCallback | None = None, loss: Any = None, **options: Any) -> None:
        args = arguments(tmp_path, max_steps=1, **options)
        data: dict[str, Any] = {"train_dataset": sequences(4), "eval_dataset": sequences(2)}
        Trainer(model, args, callbacks=[own or callback()], compute_loss_func=loss, **data).train()

    with pytest.raises(ValueError, match=r"layers of twell\.nn, got none in LlamaForCausalLM; twell\.sparsify_"):
        train(LlamaForCausalLM(llama().config))
    with pytest.raises(ValueError, match=r"label_smoothing_factor must be 0, got 0\.1"):
        train(llama(), label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"without: add twell\.recipe\.l1_term to a loss outside the model"):
        train(llama(), loss=own_loss)
    train(llama(), callback(coefficient=0.0), loss=own_loss)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        train(llama(), gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    # a target
    best = {"load_best_model_at_end": True, "save_strategy": "epoch", "eval_strategy": "epoch"}
    with pytest.raises(ValueError, match="load_best_model_at_end must be off with nnz"):
        train(llama(), callback(coefficient=None, nnz=5, moving_threshold=True), **best)
    best = {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "loss"}
    with pytest.raises(ValueError, match='save_strategy must not be "best" with moving_threshold'):
        train(llama(), callback(coefficient=None, nnz=5, moving_threshold=True), **best)
    with pytest.raises(ValueError, match="nnz must be below 48, the neurons of a layer"):
        train(llama(), callback(coefficient=None, nnz=48))
    model = llama()
    for layer in recipe.layers(model).values():
        layer.activation = "fatrelu"
    model.model.layers[0].mlp.activation = "drelu"
    with pytest.raises(ValueError, match=r'nnz needs layers without FATReLU where others have "relu2" or "drelu"'):
        train(model, callback(coefficient=None, nnz=5))
    # frozen gates stay as they are
    frozen = llama()
    for layer in recipe.layers(frozen).values():
        layer.gate_proj.requires_grad_(False)
    before = [layer.gate_proj.weight.clone() for layer in recipe.layers(frozen).values()]
    train(frozen, callback(reinitialize=0.1))
    for weight, layer in zip(before, recipe.layers(frozen).values(), strict=True):
        assert torch.equal(layer.gate_proj.weight, weight)


def test_a_run_that_was_interrupted_leaves_nothing_in_the_next(tmp_path: Path) -> None:
    def train(*callbacks: Any) -> Any:
        trainer = Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=sequences(4), callbacks=[*callbacks])
        trainer.train()
        return trainer.state.log_history[0]["loss"]

    model = llama()
    plain = train()
    first = callback(coefficient=1e3)
    with pytest.raises(KeyboardInterrupt):
        train(first, AfterSteps(interrupt))
    assert train(callback(coefficient=0.0)) == pytest.approx(plain)
    assert first.tracker is None
    assert not model._forward_hooks
    # the same one takes part in another run
    assert train(first) > 2 * plain
    # two in one Trainer are an error, which leaves nothing either
    with pytest.raises(ValueError, match="expected one for a Trainer, got a second"):
        train(callback(), callback())
    assert train() == pytest.approx(plain)


def test_a_run_that_was_interrupted_is_noticed_without_another_callback(tmp_path: Path) -> None:
    model = llama()
    args = arguments(tmp_path, max_steps=12, gradient_accumulation_steps=2)
    with pytest.raises(KeyboardInterrupt):
        Trainer(model, args, train_dataset=sequences(64), callbacks=[callback(), AfterSteps(interrupt)]).train()
    with pytest.raises(RuntimeError, match="its run was interrupted, and the L1 term has been in the loss of this one"):
        Trainer(model, args, train_dataset=sequences(64)).train()
    assert not model._forward_hooks
    Trainer(model, args, train_dataset=sequences(64)).train()
    # a longer run with it is none of that
    Trainer(model, args, train_dataset=sequences(64), callbacks=[callback()]).train()


@pytest.mark.parametrize(
    ("kind", "options"), [("leaves out", {}), ("part", {"coefficient": None, "nnz": 5}), ("frozen", {})]
)
def test_a_term_that_has_no_gradient_is_an_error(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    class Own(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            if kind == "leaves out":
                logits = model(**inputs).logits
            else:
                logits = model.lm_head(model.model(input_ids=inputs["input_ids"]).last_hidden_state)
            return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), inputs["labels"][:, 1:].reshape(-1))

    model = llama()
    if kind == "frozen":
        model.model.requires_grad_(False)
    trainer = (Trainer if kind == "frozen" else Own)(
        model, arguments(tmp_path, max_steps=2), train_dataset=sequences(8), callbacks=[callback(**options)]
    )
    with pytest.raises((ValueError, RuntimeError), match="the L1 term must have a gradient, got none in step 0"):
        trainer.train()


def test_a_term_of_ones_own_may_be_of_two_passes(tmp_path: Path) -> None:
    """The callback cleared the record of the first one; recording goes on after the run."""
    calls: list[int] = []

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss = model(**inputs).loss + model(**inputs).loss
            calls.append(len(model.model.layers[0].mlp._recorder.calls))
            return loss + 0.1 * recipe.l1_term(model, several=True)

    model = llama()
    recipe.record_aux(model)
    options: Any = {"train_dataset": sequences(4), "callbacks": [callback(coefficient=0.0)]}
    Own(model, arguments(tmp_path, max_steps=1), **options).train()
    assert calls == [2]
    recipe.clear_aux(model)
    model(**{name: each[None] for name, each in sequences(1)[0].items()})
    assert recipe.l1_term(model) > 0


def test_tuples_copies_and_generation(tmp_path: Path) -> None:
    """Models that return tuples, weight averages by deepcopy, and text generated between steps all work."""

    class Tuples(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = llama()

        def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            output = self.llama(input_ids=input_ids, labels=labels)
            return output.loss, output.logits

    model = Tuples()
    plain = llama()
    averages = []

    def between(model: Any) -> None:
        other, zeros = copy.deepcopy(model), torch.zeros(1, 4, dtype=torch.int64)
        averages.append(other(zeros, zeros)[0])
        assert averages[-1] < 10
        model.train()
        with torch.no_grad():
            for _ in range(3):
                model(zeros, labels=zeros)

    callbacks = [callback(coefficient=10.0), AfterSteps(between)]
    trainer = Recording(model, arguments(tmp_path, max_steps=3), train_dataset=sequences(6), callbacks=callbacks)
    trainer.train()
    assert len(averages) == 3
    assert_gradients(trainer, plain, 10.0, atol=1e-4)


def both_averages(device: torch.device, folder: Path) -> None:
    """Train with and without averaging of tokens over ranks; save each step, the logs and the weights."""
    rank = torch.distributed.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    results = []
    for average in (True, False):
        model = llama()
        args = arguments(
            folder / str(average),
            gradient_accumulation_steps=2,
            average_tokens_across_devices=average,
            ddp_backend="gloo",
            max_steps=3,
        )
        data = sequences(16, masked=True)
        trainer = Recording(model, args, train_dataset=data, callbacks=[callback(reinitialize=0.1)])
        trainer.train()
        assert args.world_size == 2
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        figures = [(entry["sparsity_l0"], entry["sparsity_dead"]) for entry in logs]
        results.append((trainer.steps, figures, weights(model)))
    torch.save(results, folder / f"result{rank}")


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    ranks.run(2, both_averages, tmp_path, folder=tmp_path)
    results = [torch.load(tmp_path / f"result{rank}", weights_only=False) for rank in range(2)]
    for average in range(2):
        (steps, logs, final), (other_steps, other_logs, other_final) = (result[average] for result in results)
        assert logs == other_logs
        assert all(torch.equal(a, b) for a, b in zip(final, other_final))
        plain = llama()
        for (micro, grads), (other_micro, other_grads) in zip(steps[:1], other_steps[:1]):
            assert all(torch.equal(a, b) for a, b in zip(grads, other_grads))
            if average == 0:
                # tokens counted over both ranks: twice the weight, which averaging halves
                micro, other_micro = ([(x, items / 2) for x, items in m] for m in (micro, other_micro))
            each = [plain_gradient(plain, m, 0.1) for m in (micro, other_micro)]
            for got, a, b in zip(grads, *each, strict=True):
                torch.testing.assert_close(got, (a + b) / 2, rtol=1e-4, atol=1e-6)


# A number of non-zeros instead of a coefficient


def padded(count: int) -> list[dict[str, Tensor]]:
    found = sequences(count)
    for i, each in enumerate(found):
        each["attention_mask"] = (torch.arange(LENGTH) < LENGTH - 4 * (i % 2)).long()
        each["labels"] = torch.where(each["attention_mask"] == 1, each["labels"], -100)
    return found


@pytest.mark.parametrize(
    ("nnz", "moving", "padding"), [(5, False, False), (5, True, False), (5, False, True), (None, False, True)]
)
def test_weights_are_those_of_a_plain_loop(
    nnz: int | None, moving: bool, padding: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The recipe's own loop over the same micro-batches, in which padding may be left out."""
    model = llama()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"learning_rate": 0.05, "lr_scheduler_type": "constant"}
    args = arguments(tmp_path, max_steps=6, gradient_accumulation_steps=2 if moving else 1, **options)
    wanted: dict[str, Any] = {"coefficient": None, "nnz": nnz, "moving_threshold": moving} if nnz else {}
    data = padded(24) if padding else sequences(24, masked=True)
    own = callback(**wanted, attention_mask=padding)
    trainer = Recording(model, args, train_dataset=data, callbacks=[own])
    trainer.train()
    assert "padding counts" not in caplog.text
    recipe.record_aux(plain, inputs=moving or padding)
    target: Any = recipe.TargetThreshold(plain, 5, 6) if moving else recipe.TargetSparsity(5, 6)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    coefficients, left_out = [], 0
    plain.train()
    for micro, _ in trainer.steps:
        for inputs, items in micro:
            mask = inputs.get("attention_mask")
            left_out += 0 if mask is None else int((mask == 0).sum())
            loss = plain(**inputs, num_items_in_batch=items).loss
            term = target.term(plain, attention_mask=mask) if nnz else 0.1 * recipe.l1_term(plain, attention_mask=mask)
            (loss + term / len(micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if nnz:
            target.update()
        coefficients.append(target.read()["coefficient"] if nnz else 0.1)
    assert (left_out > 0) == padding
    logged = [entry["sparsity_coefficient"] for entry in trainer.state.log_history if "sparsity_coefficient" in entry]
    assert logged == pytest.approx(coefficients, rel=1e-3)
    for a, b in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    layer = model.model.layers[0].mlp
    assert layer.activation == ("fatrelu" if moving else "relu")
    if moving:
        assert isinstance(layer.threshold, float)
        assert layer.threshold == pytest.approx(target.settle(), rel=1e-3)
        assert trainer.state.log_history[-2]["sparsity_threshold"] == pytest.approx(layer.threshold)


def test_an_encoder_decoder_has_no_mask_of_all_layers(tmp_path: Path) -> None:
    model, args = llama(), arguments(tmp_path, max_steps=2)
    model.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="attention_mask must be off for an encoder-decoder"):
        Trainer(model, args, train_dataset=padded(8), callbacks=[callback(attention_mask=True)]).train()


@pytest.mark.parametrize("moving", [False, True])
def test_a_target_goes_on_from_a_checkpoint(tmp_path: Path, moving: bool) -> None:
    # five steps an epoch, the last one with fewer micro-batches, which Trainer itself resumed wrongly before
    count = 18 if int(transformers.__version__.split(".")[0]) >= 5 else 20
    common: dict[str, Any] = {"max_steps": 6, "learning_rate": 0.05, "save_strategy": "steps", "save_steps": 3}
    common |= {"gradient_accumulation_steps": 2}

    def train(own: SparsityCallback, folder: Path = tmp_path, resume: bool = True) -> tuple[list[Tensor], Any]:
        model = llama()
        data = sequences(count, masked=True)
        trainer = Trainer(model, arguments(folder, **common), train_dataset=data, callbacks=[own])
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
        return weights(model), model.model.layers[0].mlp.threshold

    target: dict[str, Any] = {"coefficient": None, "nnz": 5, "moving_threshold": moving}
    whole, threshold = train(callback(**target), resume=False)
    resumed, again = train(callback(**target))
    assert threshold == again
    assert (threshold > 0) == moving
    for a, b in zip(resumed, whole, strict=True):
        assert torch.equal(a, b)
    # the threshold of its step, so that it can be read
    saved = load(tmp_path / "checkpoint-3").model.layers[0].mlp
    assert saved.activation == ("fatrelu" if moving else "relu")
    assert (0 < saved.threshold < threshold) == moving
    with pytest.raises(ValueError, match=r"step 3 must be of the same nnz, .*nnz 6.0, got 5.0; begin a new run"):
        train(callback(**{**target, "nnz": 6}))
    with pytest.raises(ValueError, match="checkpoint of step 3 must have no target without nnz, got one"):
        train(callback())
    if not moving:
        train(callback(), tmp_path / "without", resume=False)
        with pytest.raises(ValueError, match="checkpoint of step 3 must have a target, as nnz is 5, got none"):
            train(callback(**target), tmp_path / "without")


@pytest.mark.parametrize("nnz", [5, 30])
def test_a_missed_target_is_a_warning(nnz: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, fired = llama(), list[float]()
    own = callback(coefficient=None, nnz=nnz)
    look = AfterSteps(lambda _: fired.append(own.target.read()["non_zeros"]))  # type: ignore[union-attr]
    args = arguments(tmp_path, max_steps=2, logging_strategy="no")
    Trainer(model, args, train_dataset=sequences(4), callbacks=[own, look]).train()
    assert f"ended with {fired[-1]:.4g} non-zeros per token in its last step, where nnz is {nnz}" in caplog.text
    caplog.clear()
    own = callback(coefficient=None, nnz=fired[-1])
    Trainer(model, args, train_dataset=sequences(4), callbacks=[own, look]).train()
    assert "training ended" not in caplog.text


def test_layers_with_square_or_drelu_are_steered_by_their_gate(tmp_path: Path) -> None:
    model = llama()
    for block in model.model.layers:
        block.mlp.activation = "drelu"
    own, seen = callback(coefficient=None, nnz=5), list[Any]()
    look = AfterSteps(lambda _: seen.append(own.target))
    for _ in range(2):
        Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=sequences(4), callbacks=[own, look]).train()
        assert own.target is None
    assert [(target.of, target.steps) for target in seen] == [("gate", 1)] * 2


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_interrupted_run_leaves_no_moving_threshold(by_hand: bool, tmp_path: Path, caplog: Any) -> None:
    model = llama()

    args = arguments(tmp_path, max_steps=4, learning_rate=0.05)
    options: dict[str, Any] = {"coefficient": None, "nnz": 5, "moving_threshold": True}
    with pytest.raises(KeyboardInterrupt):
        Trainer(model, args, train_dataset=sequences(8), callbacks=[callback(**options), AfterSteps(interrupt)]).train()
    assert isinstance(model.model.layers[0].mlp.threshold, Tensor)
    if by_hand:
        for layer in recipe.layers(model).values():
            layer.threshold = 0.01
    Trainer(model, args, train_dataset=sequences(8), callbacks=[callback(**options)]).train()
    assert isinstance(model.model.layers[0].mlp.threshold, float)
    assert ("the thresholds of the layers stay as they are" in caplog.text) == by_hand


def test_a_pass_may_skip_all_layers(tmp_path: Path) -> None:
    """LayerDrop in a model with few layers."""
    model, seen = llama(layers=1), []
    block = model.model.layers[0]
    whole, skips = block.forward, iter([False, True, True, False] * 4)

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(next(skips))
        return hidden_states if seen[-1] else whole(hidden_states, *args, **kwargs)

    block.forward = forward
    for options in ({"coefficient": 0.1}, {"coefficient": None, "nnz": 5}):
        args = arguments(tmp_path, max_steps=4, learning_rate=1e-3)
        Trainer(model, args, train_dataset=sequences(8), callbacks=[callback(**options)]).train()
    assert sum(seen) == 4
