"""Tiny saved models with tokenizers, and text, for the tests of ``twell analyze`` and ``profiling.record``."""

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

WORDS = "the of and to in is that for it was on as with be by at from this have or an are not which one you were all"


def text(words: int, seed: int = 0) -> str:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = WORDS.split()
    drawn = torch.randint(len(vocabulary), (words,), generator=generator).tolist()
    return "".join(vocabulary[i] + ("\n" if place % 12 == 11 else " ") for place, i in enumerate(drawn))


def save_tokenizer(folder: Path, *, bos: bool = True) -> None:
    """A byte-level BPE; with ``bos`` it begins every text with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text(200)], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)


def build(kind: str = "llama", **options: Any) -> PreTrainedModel:
    """A random model whose layers fire fewer and fewer neurons; some are dead, and tokens are correlated."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 288,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    if kind == "opt":
        sizes |= {
            "ffn_dim": 320,
            "word_embed_proj_dim": 64,
            "activation_function": "relu",
            "do_layer_norm_before": True,
        }
    else:
        sizes |= {"intermediate_size": 320, "num_key_value_heads": 2, "hidden_act": "relu"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **options})).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight += 0.02
        for name, parameter in model.named_parameters():
            layer = next((int(part) for part in name.split(".") if part.isdecimal()), 0)
            if "gate_proj.weight" in name:
                parameter -= 0.008 * (layer + 1) * torch.randn(len(parameter), 1).abs()
            elif "gate_proj.bias" in name:
                parameter.normal_(std=0.02)
            elif "fc1.bias" in name:
                parameter.normal_(std=0.1).sub_(0.1 * (layer + 1))
            elif "layers" in name and "final_layer_norm.bias" in name:
                parameter.normal_(std=2)
    return model


def save(folder: Path, kind: str = "llama", *, bos: bool = True, **options: Any) -> Path:
    build(kind, **options).save_pretrained(folder)
    save_tokenizer(folder, bos=bos)
    return folder


def parsed(command: ModuleType, *arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


def run(command: ModuleType, *arguments: object) -> int:
    """Run a command of the command line and return its exit code; errors are raised."""
    code: int = command.run(parsed(command, *arguments))
    return code
