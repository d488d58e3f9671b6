"""Architectures of transformers, tiny and random, and what ``sparsify`` makes of each: the table of docs/models.md.

``test_models.py`` builds each and checks the answer; ``python -m tests.cpu.architectures`` writes the table.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
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
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2}
T5_GATED = {**T5, "feed_forward_proj": "gated-gelu"}
SWITCH = {**T5, "num_experts": 2, "expert_capacity": 64, "num_sparse_encoder_layers": 1}
SWITCH |= {"num_sparse_decoder_layers": 1, "num_decoder_layers": 2}
MOE = {**DECODER, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


class Architecture(NamedTuple):
    """A class of transformers with the activation of its published models.

    needs: fields of the configuration without which it is refused, and ``refusal``, a part of the message then. With
    ``retrained`` these layers are taken only with ``activation="relu"``. activation: "own" where the model's own code
    makes the zeros. part: of the names that ``filter_fn`` takes. layers: the names of the first twell layers; none if
    the architecture is refused. models: those that people know, for the page.
    """

    models: str
    kind: str
    fields: dict[str, Any]
    activation: str
    layers: Sequence[str]
    needs: Mapping[str, Any] = MappingProxyType({})
    refusal: str = ""
    retrained: bool = False
    note: str = ""
    part: str = ""

    @property
    def answer(self) -> str:
        if not self.layers:
            return "no"
        if self.retrained:
            return "after training"
        return "taken"


MLP = ("model.layers.0.mlp", "model.layers.1.mlp")
FC2 = ("model.encoder.layers.0.fc2",)
DENSE = ("encoder.block.0.layer.1.DenseReluDense",)
STACKED: dict[str, Any] = {"refusal": "stacked in one tensor", "note": "experts in one tensor, without ReLU"}
RESIDUAL: dict[str, Any] = {"refusal": "takes residual besides x", "note": "the layer also adds the residual"}

ARCHITECTURES = (
    Architecture("Arcee AFM-4.5B", "ArceeForCausalLM", DECODER, "relu2", MLP),
    Architecture("BART", "BartForConditionalGeneration", SEQ2SEQ, "GELU", FC2, retrained=True),
    Architecture(
        "RoBERTa", "RobertaModel", DECODER, "GELU", ("encoder.layer.0.output.dense",), retrained=True, note="as BERT"
    ),
    Architecture("mBART", "MBartForConditionalGeneration", SEQ2SEQ, "GELU", FC2, retrained=True),
    Architecture("mBART-50", "MBartForConditionalGeneration", RELU2SEQ, "relu", FC2),
    Architecture("Gemma 2", "Gemma2ForCausalLM", DECODER, "GELU", MLP, retrained=True),
    Architecture("Gemma 3 (text)", "Gemma3ForCausalLM", DECODER, "GELU", MLP, retrained=True),
    Architecture("OLMo", "OlmoForCausalLM", DECODER, "SiLU", MLP, retrained=True),
    Architecture(
        "Qwen2-MoE",
        "Qwen2MoeForCausalLM",
        {**MOE, "shared_expert_intermediate_size": 64},
        "SiLU",
        (),
        refusal="must apply ReLU, got SiLU",
        note="experts in one tensor, without ReLU",
    ),
    Architecture("mT5", "MT5ForConditionalGeneration", T5_GATED, "GELU", DENSE, retrained=True),
    Architecture(
        "Fuyu",
        "FuyuForCausalLM",
        {
            "text_config": {"model_type": "persimmon", **DECODER, "hidden_act": "relu2"},
            "hidden_size": 32,
            "patch_size": 2,
        },
        "relu2",
        ("model.language_model.layers.0.mlp", "model.language_model.layers.1.mlp"),
    ),
    Architecture(
        "BERT",
        "BertModel",
        DECODER,
        "GELU",
        ("encoder.layer.0.output.dense",),
        retrained=True,
        note="where a head has its activation, by `twell.sparsify_`",
    ),
    Architecture("BioGPT", "BioGptForCausalLM", DECODER, "GELU", ("biogpt.layers.0.fc2",), retrained=True),
    Architecture(
        "BitNet b1.58 2B4T",
        "BitNetForCausalLM",
        DECODER,
        "relu2",
        (),
        refusal="got beside them .*ffn_sub_norm",
        note="a norm before the down projection",
    ),
    Architecture(
        "BLOOM",
        "BloomForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "GELU",
        (),
        **RESIDUAL,
    ),
    Architecture(
        "Cosmos3 Edge (text)", "Cosmos3EdgeTextModel", {**DECODER, "rope_parameters": MROPE}, "relu2", ("layers.0.mlp",)
    ),
    Architecture(
        "Canary",
        "CanaryForConditionalGeneration",
        {"encoder_config": PARAKEET, "decoder_config": DECODER, "vocab_size": 64, "decoder_start_token_id": 1},
        "relu",
        ("model.decoder.layers.0.mlp",),
        part="decoder",
    ),
    Architecture(
        "Cohere ASR",
        "CohereAsrForConditionalGeneration",
        {**DECODER, "encoder_config": PARAKEET, "decoder_start_token_id": 1},
        "relu",
        ("model.decoder.layers.0.mlp",),
        part="decoder",
    ),
    Architecture(
        "CTRL",
        "CTRLLMHeadModel",
        {"vocab_size": 64, "n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
        "relu",
        ("transformer.h.0.ffn",),
    ),
    Architecture(
        "DETR, Conditional and Deformable DETR, RT-DETR",
        "DetrForObjectDetection",
        {
            **{key: value for key, value in SEQ2SEQ.items() if key not in ("vocab_size", "max_position_embeddings")},
            "num_queries": 5,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 8],
                "depths": [1, 1],
                "out_features": ["stage2"],
                "num_channels": 3,
            },
        },
        "relu",
        ("model.encoder.layers.0.mlp.fc2",),
    ),
    Architecture(
        "DeepSeek-V3, R1, Kimi K2",
        "DeepseekV3ForCausalLM",
        {
            **MOE,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "qk_nope_head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 4,
        },
        "SiLU",
        (),
        refusal="must apply ReLU, got SiLU",
        note="experts in one tensor, without ReLU",
    ),
    Architecture(
        "DistilBERT",
        "DistilBertModel",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
        "GELU",
        ("transformer.layer.0.ffn.lin2",),
        retrained=True,
    ),
    Architecture(
        "Falcon",
        "FalconForCausalLM",
        {k: v for k, v in DECODER.items() if k != "head_dim"},
        "GELU",
        ("transformer.h.0.mlp",),
        retrained=True,
    ),
    Architecture(
        "Fairseq WMT19 (FSMT)",
        "FSMTForConditionalGeneration",
        {**SEQ2SEQ, "langs": ["en", "de"], "src_vocab_size": 64, "tgt_vocab_size": 64},
        "relu",
        FC2,
    ),
    Architecture(
        "Gemma 3n",
        "Gemma3nForCausalLM",
        {
            **DECODER,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.95, 0.0],
        },
        "own",
        ("model.layers.0.mlp",),
        note="its ten layers with zeros",
    ),
    Architecture("Gemma", "GemmaForCausalLM", DECODER, "GELU", MLP, retrained=True),
    Architecture("GLM-4 (dense)", "GlmForCausalLM", DECODER, "SiLU", MLP, retrained=True),
    Architecture("GLM-4-0414, Z1", "Glm4ForCausalLM", DECODER, "SiLU", MLP, retrained=True),
    Architecture("GPT-2", "GPT2LMHeadModel", GPT2, "GELU", (), refusal="without any", note="no nn.Linear"),
    Architecture(
        "GPT-BigCode, StarCoder",
        "GPTBigCodeForCausalLM",
        GPT2,
        "GELU",
        ("transformer.h.0.mlp.c_proj",),
        retrained=True,
    ),
    Architecture(
        "GPT-J", "GPTJForCausalLM", {**GPT2, "rotary_dim": 4}, "GELU", ("transformer.h.0.mlp",), retrained=True
    ),
    Architecture("GPT-NeoX, Pythia", "GPTNeoXForCausalLM", DECODER, "GELU", ("gpt_neox.layers.0.mlp",), retrained=True),
    Architecture("gpt-oss", "GptOssForCausalLM", MOE, "clipped SiLU", (), **STACKED),
    Architecture("Granite", "GraniteForCausalLM", DECODER, "SiLU", MLP, retrained=True),
    Architecture("Jais 2", "Jais2ForCausalLM", DECODER, "relu2", MLP),
    Architecture("Llama 2, 3, 3.1, 3.2", "LlamaForCausalLM", DECODER, "SiLU", MLP, retrained=True),
    Architecture(
        "SparseLM, ReluLLaMA: Llama with ReLU", "LlamaForCausalLM", {**DECODER, "hidden_act": "relu"}, "relu", MLP
    ),
    Architecture("LongT5", "LongT5ForConditionalGeneration", T5_GATED, "GELU", DENSE, retrained=True),
    Architecture("M2M-100, NLLB", "M2M100ForConditionalGeneration", SEQ2SEQ, "relu", FC2),
    Architecture("Marian, Opus-MT", "MarianMTModel", SEQ2SEQ, "GELU", FC2, retrained=True),
    Architecture("Opus-MT tc-big", "MarianMTModel", RELU2SEQ, "relu", FC2),
    Architecture("Mistral, Ministral", "MistralForCausalLM", DECODER, "SiLU", MLP, retrained=True),
    Architecture("Mixtral", "MixtralForCausalLM", MOE, "SiLU", (), **STACKED),
    Architecture(
        "MobileBERT",
        "MobileBertForMaskedLM",
        {**DECODER, "hidden_size": 32, "intra_bottleneck_size": 32, "embedding_size": 16},
        "relu",
        (),
        refusal=r"MobileBertLayer\); sparsify_\(model, names=.* tries them",
        note="more than the down projection uses the hidden state",
    ),
    Architecture(
        "MPT", "MptForCausalLM", {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4}, "GELU", (), **RESIDUAL
    ),
    Architecture(
        "NeoMME",
        "NeoMMEForMaskedLM",
        {
            **{key: value for key, value in DECODER.items() if "token_id" not in key},
            "embedding_rank": 16,
            "head_dim": 16,
        },
        "relu2",
        ("model.layers.0.mlp",),
    ),
    Architecture("NanoChat", "NanoChatForCausalLM", DECODER, "relu2", ("model.layers.0.mlp",)),
    Architecture("Nemotron-4, Minitron", "NemotronForCausalLM", DECODER, "relu2", MLP),
    Architecture(
        "Nemotron-H, Nemotron 3 Nano",
        "NemotronHForCausalLM",
        {
            **MOE,
            "n_routed_experts": 4,
            "layers_block_type": ["mlp", "moe", "attention"],
            "n_group": 1,
            "topk_group": 1,
            "moe_shared_expert_intermediate_size": 64,
        },
        "relu2",
        ("model.layers.0.mixer", "model.layers.1.mixer.shared_experts"),
        note="dense layers, shared and [routed experts](experts.md)",
    ),
    Architecture(
        "NLLB-MoE",
        "NllbMoeForConditionalGeneration",
        {
            **SEQ2SEQ,
            "num_experts": 2,
            "expert_capacity": 64,
            "encoder_sparse_step": 1,
            "decoder_sparse_step": 1,
            "encoder_layers": 2,
            "decoder_layers": 2,
        },
        "relu",
        ("model.encoder.layers.0.ffn.experts.expert_0.fc2",),
        note="every expert is a layer",
    ),
    Architecture("OLMo 2", "Olmo2ForCausalLM", DECODER, "SiLU", MLP, retrained=True),
    Architecture(
        "OPT",
        "OPTForCausalLM",
        {**DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32},
        "relu",
        ("model.decoder.layers.0.fc2",),
    ),
    Architecture("Pegasus", "PegasusForConditionalGeneration", {**RELU2SEQ, "activation_dropout": 0.1}, "relu", FC2),
    Architecture("Persimmon", "PersimmonForCausalLM", DECODER, "relu2", MLP),
    Architecture("Phi-1, Phi-2", "PhiForCausalLM", DECODER, "GELU", ("model.layers.0.mlp",), retrained=True),
    Architecture("Phi-3, Phi-4", "Phi3ForCausalLM", DECODER, "SiLU", MLP, retrained=True),
    Architecture("Qwen2, Qwen2.5", "Qwen2ForCausalLM", DECODER, "SiLU", MLP, retrained=True),
    Architecture("Qwen3", "Qwen3ForCausalLM", DECODER, "SiLU", MLP, retrained=True),
    Architecture("Qwen3-MoE", "Qwen3MoeForCausalLM", MOE, "SiLU", (), **STACKED),
    Architecture(
        "SeamlessM4T, v2",
        "SeamlessM4TForTextToText",
        {
            **{key: value for key, value in SEQ2SEQ.items() if key != "d_model"},
            "hidden_size": 32,
            "speech_encoder_layers": 1,
        },
        "relu",
        ("text_encoder.layers.0.ffn.fc2",),
        note="its text encoder and decoder",
    ),
    Architecture("Speech2Text", "Speech2TextForConditionalGeneration", SEQ2SEQ, "relu", FC2),
    Architecture(
        "RWKV-4",
        "RwkvForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "attention_hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "use_cache": False,
        },
        "own",
        ("rwkv.blocks.0.feed_forward.value",),
        note="`value` alone",
    ),
    Architecture("SmolLM3", "SmolLM3ForCausalLM", DECODER, "SiLU", MLP, retrained=True),
    Architecture("StableLM", "StableLmForCausalLM", DECODER, "SiLU", MLP, retrained=True),
    Architecture("StarCoder2", "Starcoder2ForCausalLM", DECODER, "GELU", MLP, retrained=True),
    Architecture(
        "Switch Transformers",
        "SwitchTransformersForConditionalGeneration",
        SWITCH,
        "relu",
        ("encoder.block.0.layer.1.mlp",),
        note="every expert is a layer",
    ),
    Architecture("T5, Chronos", "T5ForConditionalGeneration", T5, "relu", DENSE),
    Architecture("T5 v1.1, Flan-T5", "T5ForConditionalGeneration", T5_GATED, "GELU", DENSE, retrained=True),
    Architecture("UDOP", "UdopForConditionalGeneration", {**T5, "image_size": 8}, "relu", DENSE),
    Architecture("UMT5", "UMT5ForConditionalGeneration", T5_GATED, "GELU", DENSE, retrained=True),
    Architecture("Whisper", "WhisperForConditionalGeneration", SEQ2SEQ, "GELU", FC2, retrained=True),
    Architecture(
        "XGLM",
        "XGLMForCausalLM",
        {
            "vocab_size": 64,
            "d_model": 32,
            "ffn_dim": 64,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 64,
        },
        "GELU",
        ("model.layers.0.fc2",),
        retrained=True,
    ),
    Architecture(
        "XLM, FlauBERT",
        "XLMWithLMHeadModel",
        {
            "vocab_size": 64,
            "emb_dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "pad_index": 2,
            "dropout": 0.0,
            "max_position_embeddings": 64,
        },
        "GELU",
        (),
        refusal="must apply ReLU, got GELU",
        note="taken with `gelu_activation=False`",
    ),
)


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
        remarks = [*(f"with `{key}={value}`" for key, value in each.needs.items()), *([each.note] if each.note else [])]
        remarks += [f"its {each.part}, by `filter_fn`"] if each.part else []
        kind = kinds.get((each.answer, each.activation), "After training")
        listed[kind].append(each.models + (f" ({'; '.join(remarks)})" if remarks else ""))
    lines = [f"- **{kind}**: {'; '.join(models)}." for kind, models in listed.items()]
    lines.append(
        "- **No**: " + "; ".join(f"{', '.join(models)} ({reason})" for reason, models in refused.items()) + "."
    )
    return "\n".join(textwrap.fill(line, 140, break_on_hyphens=False, subsequent_indent="  ") for line in lines)


def filled(page: str) -> str:
    """The page with the table of today."""
    begin, end = "<!-- architectures -->\n", "<!-- end of architectures -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + table() + "\n" + end + after


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
