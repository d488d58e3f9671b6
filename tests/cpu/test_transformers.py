"""The integration with transformers: tiny random models, files of both layouts, generate."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

import twell  # noqa: E402
from twell.integrations import layouts  # noqa: E402
from twell.integrations.sparsify import layers  # noqa: E402
from twell.integrations.transformers import load, sparsify  # noqa: E402

BF16 = torch.bfloat16
K, N, VOCABULARY = 32, 72, 61

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": K,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # so large that logits differ between tokens
    "initializer_range": 0.2,
}
_LLAMA = {**_SIZES, "intermediate_size": N, "num_key_value_heads": 2, "hidden_act": "relu"}
_OPT = {**_SIZES, "ffn_dim": N, "word_embed_proj_dim": K, "init_std": 0.2, "dropout": 0.0}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA),
    "llama-bias": ("LlamaConfig", "LlamaForCausalLM", {**_LLAMA, "mlp_bias": True, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _LLAMA),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_LLAMA, "head_dim": 8}),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", _LLAMA),
    "opt": ("OPTConfig", "OPTForCausalLM", _OPT),
}


def stock(name: str, seed: int = 0, **changes: Any) -> Any:
    config, cls, fields = MODELS[name]
    torch.manual_seed(seed)
    return getattr(transformers, cls)(getattr(transformers, config)(**{**fields, **changes})).eval()


def prompt(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def out(model: Any, ids: Tensor | None = None) -> Tensor:
    result: Tensor = model(input_ids=prompt() if ids is None else ids, use_cache=False)[0]
    return result


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """transformers' log, which does not propagate by itself."""
    logger = logging.getLogger("transformers")
    before, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.WARNING, "transformers"):
        yield caplog
    logger.propagate = before


def tiny(kind: str, **fields: Any) -> Any:
    sizes: dict[str, Any]
    if kind == "T5ForConditionalGeneration":
        sizes = {"d_model": K, "d_ff": N, "d_kv": 8, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    elif kind == "XLNetLMHeadModel":
        sizes = {"d_model": K, "n_layer": 2, "n_head": 4, "d_inner": N, "dropout": 0.0}
    else:
        sizes = {"hidden_size": K, "num_hidden_layers": 2, "num_attention_heads": 4}
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    return cls(cls.config_class(vocab_size=VOCABULARY, **sizes, **fields)).eval()


def tiny_rt_detr() -> Any:
    """It has an activation_function for other layers."""
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    sizes: dict[str, Any] = {"d_model": K, "decoder_layers": 1, "num_queries": 10, "num_denoising": 0, "dropout": 0.0}
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    sizes |= {"encoder_hidden_dim": K, "encoder_ffn_dim": N, "decoder_ffn_dim": N}
    sizes |= {"encoder_in_channels": [16] * 3, "decoder_in_channels": [K] * 3}
    config = transformers.RTDetrConfig(backbone_config=backbone, decoder_activation_function="gelu", **sizes)
    torch.manual_seed(0)
    return transformers.RTDetrForObjectDetection(config).eval()


def run(model: Any) -> Tensor:
    inputs = {"input_ids": prompt()}
    if model.main_input_name == "pixel_values":
        inputs = {"pixel_values": torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))}
    elif model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = prompt()
    with torch.no_grad():
        found: Tensor = model(**inputs)[0]
    return found


# what files say of layers


def given(model: Any, *activations: tuple[Any, Any]) -> Any:
    """Set the activation and threshold of each layer, the last for all that are left."""
    for i, layer in enumerate(layers(model).values()):
        layer.threshold, layer.activation = 0, activations[min(i, len(activations) - 1)][0]
        layer.threshold = activations[min(i, len(activations) - 1)][1]
    return model


def half(_: Any, name: str) -> bool:
    return ".0" in name


def git(both: bool = True) -> Any:
    sizes = {"hidden_size": K, "intermediate_size": N, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes["hidden_act"] = "relu"  # type: ignore[assignment]
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    config = transformers.GitConfig(
        vision_config=vision, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **dropout, **sizes
    )
    model = transformers.GitForCausalLM(config).eval()
    sparsify(model, filter_fn=None if both else lambda _, name: "image" not in name)
    for name, layer in layers(model).items():
        if "image" not in name:
            layer.activation, layer.threshold = "fatrelu", 0.5
    return model


def moving(model: Any) -> Any:
    return given(model, ("fatrelu", torch.tensor(0.25)))


# a model, keys of its configuration in files, a module and its activation in the record if no key names it
SAVED: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "drelu": (lambda: sparsify(stock("llama", hidden_act="silu"), activation="drelu"), {"hidden_act": "drelu"}, {}),
    "relu2": (lambda: given(sparsify(stock("opt")), ("relu2", 0)), {"activation_function": "relu2"}, {}),
    "fatrelu": (
        lambda: given(sparsify(tiny("FalconForCausalLM", activation="relu")), ("fatrelu", 0.25)),
        {"activation": "fatrelu", "hidden_act_param": 0.25},
        {},
    ),
    "moving": (lambda: moving(sparsify(stock("qwen2"))), {"hidden_act": "fatrelu", "hidden_act_param": 0.25}, {}),
    "back": (
        lambda: given(sparsify(stock("llama", hidden_act_param=0.5)), ("relu2", 0)),
        {"hidden_act": "relu2", "hidden_act_param": None},
        {},
    ),
    "by hand": (
        lambda: twell.sparsify_(stock("llama", hidden_act="silu"), activation="relu"),
        {"hidden_act": "relu"},
        {},
    ),
    "thresholds": (
        lambda: given(sparsify(stock("llama")), ("fatrelu", 0.25), ("fatrelu", 0.5)),
        {"hidden_act": "fatrelu", "hidden_act_param": None},
        {"model.layers.0.mlp": ("fatrelu", 0.25), "model.layers.1.mlp": ("fatrelu", 0.5)},
    ),
    "two": (
        lambda: given(sparsify(stock("llama")), ("drelu", 0), ("relu", 0)),
        {"hidden_act": "relu"},
        {"model.layers.0.mlp": ("drelu", 0), "model.layers.1.mlp": ("relu", 0)},
    ),
    "half": (
        lambda: given(sparsify(stock("llama"), filter_fn=half), ("relu2", 0)),
        {"hidden_act": "relu"},
        {"model.layers.0.mlp": ("relu2", 0)},
    ),
    "half of another": (
        lambda: twell.sparsify_(stock("llama", hidden_act="silu"), half, activation="relu"),
        {"hidden_act": "silu"},
        {"model.layers.0.mlp": ("relu", 0)},
    ),
    "parts": (git, {"hidden_act": "fatrelu", "hidden_act_param": 0.5}, {}),
    "a part": (lambda: git(False), {"hidden_act": "fatrelu", "hidden_act_param": 0.5}, {}),
    "told": (
        lambda: sparsify(tiny("XLNetLMHeadModel", ff_activation="relu"), names=("layer_1", "layer_2")),
        {"ff_activation": "relu"},
        {},
    ),
    "experts": (lambda: sparsify(mixtral()), {"hidden_act": "relu"}, {}),
    "channel mixing": (lambda: sparsify(rwkv()), {}, {}),
}


def mixtral() -> Any:
    fields = {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**fields)).eval()


def rwkv() -> Any:
    config = transformers.RwkvConfig(vocab_size=VOCABULARY, hidden_size=K, num_hidden_layers=2, intermediate_size=N)
    return transformers.RwkvForCausalLM(config).eval()


@pytest.mark.parametrize("case", SAVED)
def test_a_model_is_saved_as_it_is_and_loaded_as_it_was(case: str, tmp_path: Path) -> None:
    build, keys, beyond = SAVED[case]
    torch.manual_seed(0)
    model = build()
    before = model.config.to_dict()
    expected = {name: (layer.activation, float(layer.threshold)) for name, layer in layers(model).items()}
    for folder in (tmp_path, tmp_path / "again"):
        model.save_pretrained(folder)
        assert model.config.to_dict() | {"dtype": None, "architectures": None} == before | {
            "dtype": None,
            "architectures": None,
        }
        content = json.loads((folder / "config.json").read_text())
        assert {key: content.get(key) for key in keys} == keys
        record = content["twell"]
        own = {name: each for each in record for name in each["modules"] if "activation" in each}
        assert {name: (each["activation"], each.get("threshold", 0)) for name, each in own.items()} == beyond
        loaded = load(folder, dtype=torch.float32).eval()
        assert type(loaded) is type(model)
        assert not hasattr(loaded.config, "twell")
        assert {name: (each.activation, each.threshold) for name, each in layers(loaded).items()} == expected
        with torch.no_grad():
            torch.testing.assert_close(out(loaded), out(model.eval()), rtol=0, atol=0)
        if case in ("drelu", "fatrelu", "parts", "experts", "channel mixing"):
            # as 0.3 wrote it
            (folder / "config.json").write_text(json.dumps({**content, "twell": None}))
            found = {name: (each.activation, each.threshold) for name, each in layers(load(folder)).items()}
            assert found == expected
            (folder / "config.json").write_text(json.dumps(content))
        # and once more, from what was loaded
        model, before = loaded, loaded.config.to_dict()
    assert record == json.loads((tmp_path / "config.json").read_text())["twell"]


def test_the_record_is_short(tmp_path: Path) -> None:
    dense, model = stock("llama"), sparsify(stock("llama"))
    dense.save_pretrained(tmp_path / "dense")
    model.save_pretrained(tmp_path / "sparse")
    contents = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("dense", "sparse")]
    names = ["gate_proj", "up_proj", "down_proj"]
    assert contents[1].pop("twell") == [
        {"class": "SparseGatedMLP", "modules": ["model.layers.*.mlp"], "names": names},
    ]
    assert contents[0] == contents[1]
    one, two = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("dense", "sparse"))
    assert one == two
    # wrappers leave no trace
    model.model.layers[1].mlp = checkpoint_wrapper(model.model.layers[1].mlp)
    given(model, ("fatrelu", 0.5), ("fatrelu", 0.25)).save_pretrained(tmp_path / "wrapped")
    assert [layer.threshold for layer in layers(load(tmp_path / "wrapped")).values()] == [0.5, 0.25]
    # of the stock class alone it goes
    again = type(dense).from_pretrained(tmp_path / "sparse")
    again.save_pretrained(tmp_path / "dense")
    assert "twell" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_a_class_that_makes_layers_of_twell_knows_their_activation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for block in self.model.layers:
                block.mlp = twell.nn.SparseGatedMLP(K, N, activation="relu2")

    model = Own(transformers.LlamaConfig(**_LLAMA | {"hidden_act": "silu"}))
    for layer in (None, *layers(model).values()):
        if layer is not None:
            layer.activation = "drelu"
        model.save_pretrained(tmp_path)
        content = json.loads((tmp_path / "config.json").read_text())
        assert content["hidden_act"] == "silu"
        own = [name for each in content["twell"] if "activation" in each for name in each["modules"]]
        assert len(own) == sum(each.activation == "drelu" for each in layers(model).values()) or own == [
            "model.layers.*.mlp"
        ]
        assert ("in the record of files alone" in caplog.text) == (layer is not None)


def test_records_that_are_wrong(tmp_path: Path) -> None:
    sparsify(stock("llama")).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    entry = content["twell"][0]
    for wrong, message in (
        ("yes", '"twell" of the configuration must be as save_pretrained wrote it'),
        ([{"class": "SparseGatedMLP"}], "must be as save_pretrained wrote it: 'modules'"),
        ([entry | {"activation": "gelu"}], "as save_pretrained wrote it: activation must be"),
        ([entry, entry | {"modules": ["model.mlp"]}], r"got none that is model\.mlp: take the key \"twell\" out"),
    ):
        path.write_text(json.dumps(content | {"twell": wrong}))
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def qwen3_next() -> Any:
    """Its linear attention keeps the word, and the function of it."""
    sizes = {**_LLAMA, "hidden_act": "silu", "head_dim": 8, "mlp_only_layers": [0, 1]}
    sizes |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
    sizes |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**sizes)).eval()


def with_arguments() -> Any:
    class Mine(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any, more: int) -> None:
            super().__init__(config)

    return Mine(stock("llama", hidden_act="silu").config, 1)


@pytest.mark.parametrize(
    ("build", "options", "why"),
    [
        (
            lambda: stock("llama", hidden_act="silu"),
            {"filter_fn": half},
            r"got that of model\.layers\.1\.mlp\.act_fn, too",
        ),
        (qwen3_next, {}, r"hidden_act must be .* got that of model\.layers\.0\.linear_attn\.act"),
        (with_arguments, {}, "Mine must be made from its configuration alone, got .*'more'"),
    ],
)
def test_an_activation_without_a_key_of_its_own_is_not_changed(build: Any, options: Any, why: str) -> None:
    model = build()
    before = model.config.to_dict()
    with pytest.raises(ValueError, match=rf"sparsify: a new activation must have a key of the configuration: .*{why}"):
        sparsify(model, activation="relu", **options)
    assert not layers(model)
    assert model.config.to_dict() == before
    with pytest.raises(ValueError, match="got 'fatrelu'; training finds its threshold"):
        sparsify(model, activation="fatrelu")


@pytest.mark.parametrize(
    ("build", "names", "after"),
    [
        (lambda: tiny("XLNetLMHeadModel", **dict.fromkeys(("ff_activation", "summary_activation"), "gelu")),
         ("layer_1", "layer_2"), {"ff_activation": "relu", "summary_activation": "gelu"}),
        (lambda: tiny("T5ForConditionalGeneration", feed_forward_proj="gated-gelu"), None,
         {"dense_act_fn": "relu", "feed_forward_proj": "gated-relu"}),
        (lambda: tiny_rt_detr(), None, {"encoder_activation_function": "relu", "decoder_activation_function": "relu",
                                        "activation_function": "silu"}),
    ],
)  # fmt: skip
def test_the_stock_class_computes_the_same_whatever_the_key(build: Any, names: Any, after: Any, tmp_path: Path) -> None:
    model = sparsify(build(), activation="relu", names=names)
    assert {key: getattr(model.config, key) for key in after} == after
    model.save_pretrained(tmp_path)
    dense = type(model).from_pretrained(tmp_path).eval()
    assert not layers(dense)
    torch.testing.assert_close(run(model), run(dense), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "given", "expected"),
    [
        ({}, {}, ("auto", False, "auto", 8)),
        ({"strategy": "row", "compression": 2}, {}, ("row", False, "auto", 2)),
        ({"strategy": "row", "compression": 2}, {"strategy": "union", "compression": 4}, ("union", False, "auto", 4)),
        ({"strategy": "row", "invariant": True, "screen": "off"}, {}, ("row", True, "off", 8)),
        ({"strategy": "row", "invariant": True}, {"strategy": "union"}, "with invariant=True, got"),
        ({}, {"strategy": "quick"}, "strategy must be"),
    ],
)
def test_settings_of_layers(keys: dict[str, Any], given: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    stock("llama", **{f"sparsity_{key}": value for key, value in keys.items()}).save_pretrained(tmp_path / "down")
    options = {"subfolder": "down", "dtype": BF16, "local_files_only": True}
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            load(tmp_path, **options, **given)
        return
    model = load(tmp_path, **options, **given)
    assert model.dtype == BF16
    found = {(each.strategy, each.invariant, each.screen, each.compression) for each in layers(model).values()}
    assert found == {expected}


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: stock("llama", hidden_act="silu"), "must apply ReLU, got SiLU"),
        (lambda: tiny("T5ForConditionalGeneration"), "load: the model must be a causal one, got 't5' in"),
        # its decoder alone would have new embeddings
        (lambda: tiny("PegasusForConditionalGeneration", **PEGASUS), "must be a causal one, got 'pegasus' in"),
        (lambda: moved(stock("llama"), hidden_act="fatrelu"), "must have its threshold, hidden_act_param"),
        (lambda: moved(stock("llama"), num_hidden_layers=3), r"must have all weights, got none for model\.layers\.2"),
    ],
)
def test_what_load_refuses(build: Any, why: str, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=why):
        load(tmp_path)


PEGASUS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": N, "decoder_ffn_dim": N, "d_model": K}


def moved(model: Any, **fields: Any) -> Any:
    model.config.update(fields)
    return model


def stored(folder: Path) -> dict[str, Tensor]:
    return {key: t for file in folder.glob("*.safetensors") for key, t in safetensors_torch.load_file(file).items()}


# Files of twell 0.3 and of the paper's code


def store(
    model: Any,
    folder: Path,
    fields: dict[str, Any],
    *,
    rows: bool = False,
    size: str = "1GB",
    pickled: bool = False,
) -> Path:
    """A folder with a model whose configuration has other ``fields``; down weights by ``rows``, or pickled."""
    model.save_pretrained(folder, max_shard_size=size)
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), **fields}))
    for file in folder.glob("*.safetensors"):
        state = {
            key: t.t().contiguous() if rows and key.endswith("down_proj.weight") else t
            for key, t in safetensors_torch.load_file(file).items()
        }
        safetensors_torch.save_file(state, file, {"format": "pt"})
        if pickled:
            file.unlink()
            torch.save(state, folder / "pytorch_model.bin")
    return folder


def of_0_3(kind: str, **more: Any) -> dict[str, Any]:
    """The keys that version 0.3 wrote for its sparse classes."""
    own = {"model_type": f"sparse_{kind}", "architectures": [f"Sparse{MODELS[kind][1]}"], "sparsity_strategy": "row"}
    return own | {"sparsity_compression": 2, "sparsity_down_layout": "linear"} | more


PAPER = {
    "sparsity_gated_mlp": True,
    "sparsity_l1_coeff": 2e-5,
    "sparsity_new_intermediate_size": N,
    "sparsity_use_hybrid_kernel": True,
    "hidden_act": "silu",
    "intermediate_size": 4 * N,
    "auto_map": {"AutoModelForCausalLM": "theirs.Theirs"},
}
LLAMA_TYPE = {"model_type": "llama_sparse_relu", "architectures": ["Theirs"]}
SQUARE = PAPER | {"sparsity_new_intermediate_size": K}
ROWS = {"sparsity_down_layout": "rows"}


@pytest.mark.parametrize(
    ("kind", "fields", "how", "activation"),
    [
        ("qwen2", of_0_3("qwen2"), {}, "relu"),
        ("llama", of_0_3("llama"), {"size": "20KB"}, "relu"),
        ("llama", of_0_3("llama", hidden_act="relu2"), {}, "relu2"),
        ("llama", PAPER | LLAMA_TYPE, {}, "relu"),
        ("qwen2", PAPER, {"rows": True, "size": "20KB"}, "relu"),
        ("llama", PAPER, {"rows": True, "pickled": True}, "relu"),
        ("qwen2", PAPER | LLAMA_TYPE | {"model_type": "qwen2_sparse_relu"}, {"pickled": True}, "relu"),
        ("llama", PAPER | {"hidden_act": "drelu"}, {}, "drelu"),
        # the key of a stock class, as `twell convert` of 0.3 left it
        ("llama", ROWS, {"rows": True}, "relu"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_files_of_others(
    kind: str, fields: Any, how: Any, activation: Any, dtype: Any, tmp_path: Path, quiet: pytest.LogCaptureFixture
) -> None:
    model = stock(kind)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    folder = store(model, tmp_path, fields, **how)
    loaded = load(folder, dtype=dtype)
    assert not [r for r in quiet.records if r.levelno >= logging.WARNING and r.name.startswith("transformers")]
    assert (type(loaded), loaded.dtype) == (type(model), dtype)
    assert all(m.down_proj.weight.is_contiguous() for m in layers(loaded).values())
    assert loaded.config.intermediate_size == N
    assert getattr(loaded.config, "sparsity_l1_coeff", None) == fields.get("sparsity_l1_coeff")
    own = fields.get("sparsity_strategy", "auto"), fields.get("sparsity_compression", 8)
    assert {(each.strategy, each.compression) for each in layers(loaded).values()} == {own}
    expected = out(given(sparsify(model, strategy=own[0]), (activation, 0)))
    assert torch.equal(out(loaded), expected)
    # over the very files that the weights came from
    loaded.save_pretrained(folder)
    assert layouts.LAYOUT_KEY not in json.loads((folder / "config.json").read_text())
    assert torch.equal(out(load(folder, dtype=dtype)), expected)
    if activation != "drelu":
        again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        assert (type(again), len(layers(again))) == (type(model), 0)
        torch.testing.assert_close(out(again), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("fields", "how", "why"),
    [
        (PAPER | {"sparsity_gated_mlp": False}, {}, "layers must have a gate, .* got sparsity_gated_mlp = False"),
        (SQUARE, {}, r"must be \[32, 32\] or \[32, 32\], whose order tells the layout"),
        (ROWS | {"intermediate_size": K}, {"pickled": True}, r"must be \[32, 32\] or \[32, 32\], whose order tells"),
        (PAPER | {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}, {"rows": True},
         r"down_proj.weight: quantised weights must be \[hidden, intermediate\]"),
    ],
)  # fmt: skip
def test_files_of_others_that_are_refused(
    fields: Any, how: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # scales of weights on a GPU lie along one side
    quantizer = transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer
    monkeypatch.setattr(quantizer, "validate_environment", lambda *_, **__: None)
    size = N if "quantization_config" in fields else K
    folder = store(stock("llama", intermediate_size=size), tmp_path, fields, **how)
    with pytest.raises(ValueError, match=why):
        load(folder)


OWN_CODE = """
import torch
from transformers import LlamaForCausalLM
class Mine(LlamaForCausalLM):
    def __init__(self, config):
        named, config.hidden_act = config.hidden_act, "relu"
        super().__init__(config)
        config.hidden_act = named
        for block in self.model.layers:
            block.mlp.act_fn = torch.nn.{activation}
"""


def test_own_code_reads_its_own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It got one that named ReLU, and the layers what the folder's configuration named."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    stock("llama").save_pretrained(tmp_path / "own")
    content = json.loads((tmp_path / "own" / "config.json").read_text())
    content |= {"auto_map": {"AutoModelForCausalLM": "code_of_mine.Mine"}, "hidden_act": "fatrelu"}
    (tmp_path / "own" / "config.json").write_text(json.dumps(content | {"hidden_act_param": 0.5}))
    code = tmp_path / "own" / "code_of_mine.py"
    code.write_text(OWN_CODE.format(activation="Threshold(0.125, 0.0)"))
    loaded = load(tmp_path / "own", trust_remote_code=True)
    assert {(layer.activation, layer.threshold) for layer in layers(loaded).values()} == {("fatrelu", 0.125)}
    code.write_text(OWN_CODE.format(activation="SiLU()"))
    with pytest.raises(ValueError, match="must apply ReLU"):
        load(tmp_path / "own", trust_remote_code=True)


@pytest.mark.parametrize("kind", ["llama-bias", "nemotron", "opt"])
def test_a_compacted_model_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    """The folder that save_pretrained wrote was one that no class could load."""
    model = sparsify(stock(kind))
    masks = {name: torch.arange(N) % (i + 3) > 0 for i, name in enumerate(layers(model))}
    small, report = twell.compact(model, masks)
    assert report.kept < report.neurons
    small.save_pretrained(tmp_path, max_shard_size="20KB")
    loaded = load(tmp_path)
    assert type(loaded) is type(model)
    assert stored(tmp_path).keys() >= small.state_dict().keys() - {"lm_head.weight"}
    assert all(torch.equal(value, small.state_dict()[key]) for key, value in loaded.state_dict().items())
    assert torch.equal(out(loaded), out(small))
    if kind == "opt":
        small.model.decoder.layers[0].fc2.compaction.kept[:] = True
        small.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"fc2 must have the 72 neurons of its mask, got 48"):
            load(tmp_path)


# Models in servers and trainers


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_weights_stay_when_more_are_loaded(kind: str) -> None:
    model = sparsify(stock(kind))
    expected = out(model)
    model.init_weights()
    assert torch.equal(out(model), expected)
    model.resize_token_embeddings(VOCABULARY + 3)
    assert torch.equal(out(model)[..., :VOCABULARY], expected)
