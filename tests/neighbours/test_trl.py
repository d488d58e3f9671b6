"""TRL: a supervised fine-tuning trainer has its loss outside the model, and trains as ``SparsityCallback`` says."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")

import datasets
import torch
import trl
from neighbours import LAYERS, assert_near, causal_model, sparse_model, token_ids
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from twell import recipe
from twell.integrations.transformers import SparsityCallback


def trainer(kind: Any, model: Any, folder: Path, callbacks: list[Any]) -> Any:
    arguments = trl.SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=1,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    data = datasets.Dataset.from_dict({"input_ids": token_ids().tolist()})
    return kind(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)


def test_a_loss_outside_the_model_is_refused(tmp_path: Path) -> None:
    callback = SparsityCallback(0.1)
    with pytest.raises((ValueError, RuntimeError), match=r"computed outside the model .*l1_term"):
        trainer(trl.SFTTrainer, sparse_model("llama"), tmp_path, [callback]).train()


def test_a_step_has_the_term_that_compute_loss_adds(tmp_path: Path) -> None:
    class WithTerm(trl.SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
            loss = super().compute_loss(model, inputs, **options)
            return loss + 0.1 * recipe.l1_term(model)

    model = sparse_model("llama")
    recipe.record_aux(model)
    trained = trainer(WithTerm, model, tmp_path, [SparsityCallback(0)])
    trained.train()
    assert trained.state.log_history[0]["sparsity_l0"] > 0

    stock, hidden = causal_model("llama").train(), []
    for layer in stock.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    loss = stock(input_ids=token_ids(), labels=token_ids()).loss
    assert len(hidden) == LAYERS
    term = sum(h.abs().sum(-1).mean() for h in hidden) / LAYERS
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    (loss + 0.1 * term).backward()
    optimizer.step()
    for found, expected in zip(model.parameters(), stock.parameters(), strict=True):
        assert_near(found, expected)
