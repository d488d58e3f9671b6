"""Architectures of transformers, tiny and random, and what ``sparsify`` makes of each: the table of docs/models.md.

``test_models.py`` builds each and checks the answer; ``python -m tests.cpu.architectures`` writes the table.
"""

import ast
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 8,
}
PARAKEET = {"model_type": "parakeet_encoder", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
PARAKEET |= {"intermediate_size": 64, "num_mel_bins": 16, "subsampling_conv_channels": 8}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
RELU2SEQ = {**SEQ2SEQ, "activation_function": "relu"}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
RESNET |= {"out_features": ["stage2"], "num_channels": 3}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2}
T5_GATED = {**T5, "feed_forward_proj": "gated-gelu"}
SWITCH = {**T5, "num_experts": 2, "expert_capacity": 64, "num_sparse_encoder_layers": 1}
SWITCH |= {"num_sparse_decoder_layers": 1, "num_decoder_layers": 2}
MOE = {**DECODER, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
OWN: dict[str, dict[str, Any]] = {
    "FuyuForCausalLM": {
        "text_config": {"model_type": "persimmon", **DECODER, "hidden_act": "relu2"},
        "hidden_size": 32,
        "patch_size": 2,
    },
    "Cosmos3EdgeTextModel": {**DECODER, "rope_parameters": MROPE},
    "CanaryForConditionalGeneration": {
        "encoder_config": PARAKEET,
        "decoder_config": DECODER,
        "vocab_size": 64,
        "decoder_start_token_id": 1,
    },
    "CohereAsrForConditionalGeneration": {**DECODER, "encoder_config": PARAKEET, "decoder_start_token_id": 1},
    "DetrForObjectDetection": {
        **{key: value for key, value in SEQ2SEQ.items() if key not in ("vocab_size", "max_position_embeddings")},
        "num_queries": 5,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone_config": RESNET,
    },
    "DeepseekV3ForCausalLM": {
        **MOE,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "v_head_dim": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
    },
    "FalconForCausalLM": {key: value for key, value in DECODER.items() if key != "head_dim"},
    "FSMTForConditionalGeneration": {**SEQ2SEQ, "langs": ["en", "de"], "src_vocab_size": 64, "tgt_vocab_size": 64},
    "Gemma3nForCausalLM": {
        **DECODER,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.0],
    },
    "NeoMMEForMaskedLM": {
        **{key: value for key, value in DECODER.items() if "token_id" not in key},
        "embedding_rank": 16,
        "head_dim": 16,
    },
    "NemotronHForCausalLM": {
        **MOE,
        "n_routed_experts": 4,
        "layers_block_type": ["mlp", "moe", "attention"],
        "n_group": 1,
        "topk_group": 1,
        "moe_shared_expert_intermediate_size": 64,
    },
    "SeamlessM4TForTextToText": {
        **{key: value for key, value in SEQ2SEQ.items() if key != "d_model"},
        "hidden_size": 32,
        "speech_encoder_layers": 1,
    },
}
SETS = {"DECODER": DECODER, "SEQ2SEQ": SEQ2SEQ, "RELU2SEQ": RELU2SEQ, "GPT2": GPT2, "T5": T5, "T5_GATED": T5_GATED}
SETS |= {"SWITCH": SWITCH, "MOE": MOE}


class Architecture(NamedTuple):
    """A class of transformers with the activation of its published models: a line of ``architectures.txt``.

    models: those that people know, for the page. fields: of its configuration. activation: "own" where the model's own
    code makes the zeros. With ``retrained`` the layers are taken only with ``activation="relu"``. layers: the names of
    the first twell layers; none if the architecture is refused, and ``refusal`` is a part of the message then.
    part: of the names that ``filter_fn`` takes.
    """

    models: str
    kind: str
    fields: dict[str, Any]
    activation: str
    retrained: bool
    layers: Sequence[str]
    refusal: str
    note: str
    part: str

    @classmethod
    def of(cls, line: str) -> "Architecture":
        models, kind, fields, activation, layers, note, part, *_ = [*line.split(" | "), "", ""]
        activation, _, after = activation.partition(", then ")
        _, refused, refusal = layers.partition("refused: ")
        first = () if refused else layers.split()
        return cls(models, kind, fields_of(kind, fields), activation, bool(after), first, refusal, note, part)

    @property
    def answer(self) -> str:
        if not self.layers:
            return "no"
        if self.retrained:
            return "after training"
        return "taken"


def fields_of(kind: str, text: str) -> dict[str, Any]:
    """The fields of a configuration: a set of them and changes, or those of its class alone."""
    found: dict[str, Any] = dict(OWN[kind]) if text == "its own" else {}
    for part in text.split() if text != "its own" else ():
        name, changed, value = part.partition("=")
        if changed:
            found[name] = value if value.isalpha() and value != "False" else ast.literal_eval(value)
        else:
            found |= SETS[name]
    return found


LINES = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
ARCHITECTURES = [Architecture.of(line) for line in LINES if not line.startswith("#")]


def table() -> str:
    """What the page says of each model: lists of those taken and of those to train, the reasons of the others."""
    kinds = {("taken", "relu"): "Taken, with ReLU", ("taken", "relu2"): "Taken, with squared ReLU"}
    kinds |= {("taken", "own"): "Taken, with zeros of their own code"}
    listed: dict[str, list[str]] = {kind: [] for kind in (*kinds.values(), "After training")}
    refused: dict[str, list[str]] = {}
    for each in sorted(ARCHITECTURES, key=lambda each: each.models.lower()):
        if each.answer == "no":
            refused.setdefault(each.note, []).append(each.models)
            continue
        remarks = [each.note] if each.note else []
        remarks += [f"its {each.part}, by `filter_fn`"] if each.part else []
        kind = kinds.get((each.answer, each.activation), "After training")
        listed[kind].append(each.models + (f" ({'; '.join(remarks)})" if remarks else ""))
    lines = [f"- **{kind}**: {'; '.join(models)}." for kind, models in listed.items()]
    lines.append(
        "- **No**: " + "; ".join(f"{', '.join(models)} ({reason})" for reason, models in refused.items()) + "."
    )
    return "\n".join(textwrap.fill(line, 140, break_on_hyphens=False, subsequent_indent="  ") for line in lines)


def filled(page: str) -> str:
    begin, end = "<!-- architectures -->\n", "<!-- end of architectures -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + table() + "\n" + end + after


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
