"""Layouts of e4m3 weights in checkpoints: what configurations say of a module, and its tensors."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from twell.float8 import E4M3, quantize
from twell.integrations.float8_layouts import Scheme, how, weight_of

UP = "model.layers.0.mlp.up_proj"
STATIC = ("input_scale",)

E4M3_WEIGHTS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
TOKENS = E4M3_WEIGHTS | {"strategy": "token", "dynamic": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}


def compressed(strategy: str = "channel", weights: Any = None, inputs: Any = None, **more: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors, with entries that differ from those of FP8_DYNAMIC."""
    group = {
        "targets": ["Linear"],
        "weights": E4M3_WEIGHTS | {"strategy": strategy} | (weights or {}),
        "input_activations": TOKENS | inputs if isinstance(inputs, dict) else TOKENS,
    }
    if inputs == "none":
        group["input_activations"] = None
    base = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return base | {"config_groups": {"group_0": group}} | more


def modelopt(algorithm: str | None, **more: Any) -> dict[str, Any]:
    return {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm} | more}


@pytest.mark.parametrize(
    ("configuration", "expected"),
    [
        (None, None),
        ({}, None),
        ({"hidden_size": 8, "text_config": None}, None),
        ({"quantization_config": None, "text_config": {"hidden_size": 8}}, None),
        (compressed(), Scheme("row")),
        (compressed("tensor"), Scheme("tensor")),
        (compressed("tensor", inputs={"strategy": "tensor", "dynamic": False}), Scheme("tensor", inputs=STATIC)),
        (compressed("channel", inputs={"strategy": "tensor", "dynamic": False}), Scheme("row", inputs=STATIC)),
        (compressed("block", {"block_structure": [128, 128]}, {"strategy": "group"}), Scheme("block")),
        (compressed("block", {"block_structure": "128x128"}), Scheme("block")),
        (compressed(format="naive-quantized"), Scheme("row")),
        (compressed(sparsity_config={"format": "dense"}, transform_config={"config_groups": {}}), Scheme("row")),
        # weights of these are in 16 bits, and quantised when they are used
        (compressed(format="dense"), None),
        (compressed(format="fakequant"), None),
        # only the cache of keys and values
        (compressed(config_groups={}), None),
        (FP8, Scheme("tensor", ("weight_scale", "weight_scale_inv"))),
        (
            FP8 | {"activation_scheme": "static"},
            Scheme("tensor", ("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale")),
        ),
        (BLOCKS, Scheme("block", ("weight_scale_inv",))),
        (BLOCKS | {"weight_block_size": (128, 128), "scale_fmt": "ue8m0"}, Scheme("block", ("weight_scale_inv",))),
        (modelopt("FP8"), Scheme("tensor", inputs=STATIC)),
        (modelopt("fp8"), Scheme("tensor", inputs=STATIC)),
        (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), Scheme("row")),
        (modelopt("fp8_pb_wo"), Scheme("block")),
        (modelopt(None, kv_cache_quant_algo="FP8"), None),
        (modelopt("MIXED_PRECISION", quantized_layers={UP: {"quant_algo": "FP8"}}), Scheme("tensor", inputs=STATIC)),
        (modelopt("MIXED_PRECISION", quantized_layers={"lm_head": {"quant_algo": "NVFP4"}}), None),
        # also with groups of compressed-tensors, which name no strategy
        (compressed() | {"quant_method": "modelopt", "quant_algo": "FP8"}, Scheme("tensor", inputs=STATIC)),
    ],
)
def test_layouts(configuration: dict[str, Any] | None, expected: Scheme | None) -> None:
    assert how(configuration, UP) == expected
    if configuration and "quant_method" in configuration:
        for outer in ("quantization_config", "compression_config"):
            assert how({"hidden_size": 8, outer: configuration}, UP) == expected
            assert how({"text_config": {outer: configuration}}, UP) == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        compressed("tensor_group", {"num_bits": 4}, format="nvfp4-pack-quantized"),
        "4-bit float by tensor_group in format n",
    ),
    (compressed("group", {"num_bits": 4}, format="mxfp4-pack-quantized"), "4-bit float by group in format mxfp4"),
    (compressed("group", {"num_bits": 8}, format="mxfp8-quantized"), "8-bit float by group in format mxfp8-quantized"),
    (compressed("channel", {"type": "int"}, format="int-quantized"), "8-bit int by channel in format int-quantized"),
    (compressed("group", {"num_bits": 4, "type": "int"}, format="pack-quantized"), "4-bit int by group"),
    (compressed(weights={"symmetric": False}), "8-bit float with offsets by channel"),
    (compressed("group"), "weights of 8-bit float by group in format float-quantized"),
    (compressed("tensor", inputs={"strategy": "tensor", "dynamic": "local"}), "static inputs of 8-bit float by tensor"),
    (compressed(weights={"dynamic": True}), "weights of 8-bit float by channel"),
    (compressed(format="marlin-24"), "in format marlin-24"),
    (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "format sparse-24-bitmask"),
    (compressed(transform_config={"config_groups": {"R1": {}}}), "inputs rotated by transform_config"),
    (compressed(inputs="none"), "inputs of 16 bits"),
    (compressed(inputs={"type": "int"}), "inputs of 8-bit int by token"),
    (compressed(inputs={"dynamic": "local"}), "static inputs of 8-bit float by token with weights by channel"),
    (compressed(inputs={"dynamic": False}), "static inputs of 8-bit float by token"),
    (compressed("block", {"block_structure": [128, 64]}), r"blocks of \[128, 64\]"),
    (compressed("block"), "blocks of None"),
    (
        compressed("block", {"block_structure": [128, 128]}, {"strategy": "tensor", "dynamic": False}),
        "static inputs of 8-bit float by tensor with weights by block",
    ),
    (BLOCKS | {"weight_block_size": [1, 32]}, r"blocks of \[1, 32\]"),
    (BLOCKS | {"activation_scheme": "static"}, "blocks with static inputs"),
    (modelopt("NVFP4"), "quant_algo NVFP4"),
    (modelopt("MIXED_PRECISION", quantized_layers={UP: {"quant_algo": "W4A8_AWQ"}}), "quant_algo W4A8_AWQ"),
    *(({"quant_method": each}, f"quant_method {each}") for each in ("awq", "gptq", "bitsandbytes", "mxfp4", "torchao")),
    ({"quant_method": ["fp8"]}, r"quant_method \['fp8'\]"),
]


@pytest.mark.parametrize(("configuration", "found"), REFUSED, ids=[found for _, found in REFUSED])
def test_others_are_refused_by_one_sentence(configuration: dict[str, Any], found: str) -> None:
    with pytest.raises(
        NotImplementedError, match=f"^{UP} must be in bfloat16, or .* got .*{found}.*: take a checkpoint"
    ):
        how(configuration, UP)


# lists of modules in 16 bits: of a writer, under a key, with names that they mean and names that they do not
LISTS: list[tuple[dict[str, Any], str, str, list[str], list[str]]] = [
    (compressed(), "ignore", UP, [UP], [UP + "_2", "model." + UP, UP[:-1]]),
    (compressed(), "ignore", r"re:.*\.mlp\.up_proj$", [UP], [UP + ".x"]),
    # from the beginning, and to anywhere
    (compressed(), "ignore", "re:model.layers.0", [UP, "model.layers.01.up_proj"], ["x." + UP]),
    (compressed(), "ignore", "re:mlp", ["mlp.up_proj"], [UP]),
    (compressed(), "ignore", "Linear", [UP], []),
    (compressed(), "ignore", "Conv2d", [], [UP]),
    (compressed(), "ignore", "model.layers.0.mlp", [], [UP]),
    (BLOCKS, "modules_to_not_convert", UP, [UP], ["model.layers.0.mlp.gate_proj"]),
    (BLOCKS, "modules_to_not_convert", "model.layers.1", ["model.layers.1.up_proj"], ["model.layers.11.up_proj"]),
    (BLOCKS, "modules_to_not_convert", "model.layers.*", ["model.layers.11.up_proj"], ["x.model.layers.1.up_proj"]),
    (BLOCKS, "modules_to_not_convert", "up_proj", [UP], ["up_proj_2"]),
    (BLOCKS, "modules_to_not_convert", r"lm_head|.*\.0\.mlp", [UP, "lm_head"], ["model.layers.1.mlp.up_proj"]),
    (BLOCKS, "ignored_layers", UP, [UP], ["model.layers.1.mlp.up_proj"]),
    (FP8, "ignored_layers", "model.layers.0.mlp", [UP], ["model.layers.0.mlp_2.up_proj"]),
    (modelopt("FP8"), "exclude_modules", UP, [UP], [UP + "_2", "x." + UP]),
    (modelopt("FP8"), "exclude_modules", "model.layers.0.mlp", [UP], ["model.layers.0.mlp2.up_proj"]),
    (modelopt("FP8"), "exclude_modules", "model.layers.0*", [UP, "model.layers.0"], ["model.layers.1.mlp.up_proj"]),
    (modelopt("FP8"), "exclude_modules", "*.mlp.up_proj", [UP], ["model.layers.0.mlp.down_proj"]),
    (modelopt("FP8"), "exclude_modules", "*Layers*", [], [UP]),
    (modelopt("NVFP4"), "exclude_modules", "*mlp*", [UP], []),
    ({"quant_algo": "FP8", "quant_method": "modelopt"}, "ignore", "model.layers.?.mlp*", [UP], ["model.mlp"]),
    ({"quant_method": "awq"}, "modules_to_not_convert", "mlp.up_proj", [UP], []),
    ({"quant_method": "bitsandbytes"}, "llm_int8_skip_modules", "up_proj", [UP], []),
]


@pytest.mark.parametrize(("configuration", "key", "pattern", "meant", "others"), LISTS)
def test_modules_that_stay_in_16_bits(
    configuration: dict[str, Any], key: str, pattern: str, meant: list[str], others: list[str]
) -> None:
    inner = configuration.get("quantization", configuration)
    for patterns in ([pattern], ["nothing", pattern]):
        changed = inner | {key: patterns}
        changed = {"quantization": changed} if "quantization" in configuration else changed
        assert [how(changed, name) for name in meant] == [None] * len(meant)
        assert None not in [how(changed, name) for name in others]


def test_the_closest_target_decides() -> None:
    """A name before a pattern, a pattern before the class; a module that no target means is in 16 bits."""
    groups = {strategy: compressed(strategy)["config_groups"]["group_0"] for strategy in ("channel", "tensor")}
    int8 = compressed(weights={"type": "int"})["config_groups"]["group_0"]

    def configuration(**targets: list[str]) -> dict[str, Any]:
        every = groups | {"int8": int8}
        return compressed(config_groups={name: every[name] | {"targets": each} for name, each in targets.items()})

    assert how(configuration(channel=["Linear"], tensor=["re:.*up_proj"]), UP) == Scheme("tensor")
    assert how(configuration(channel=[UP], tensor=["re:.*up_proj"], int8=["Linear"]), UP) == Scheme("row")
    assert how(configuration(tensor=["re:.*up_proj"], channel=[UP]), UP) == Scheme("row")
    assert how(configuration(tensor=["re:.*up_proj"], channel=["re:.*"]), UP) == Scheme("tensor")
    assert how(configuration(channel=["re:.*down_proj", "Embedding"]), UP) is None
    with pytest.raises(NotImplementedError, match="8-bit int"):
        how(configuration(channel=["Linear"], int8=[UP]), UP)
    of_group = compressed(format="mixed-precision")
    for form, expected in (("float-quantized", Scheme("row")), ("dense", None)):
        of_group["config_groups"]["group_0"]["format"] = form
        assert how(of_group, UP) == expected


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        (compressed(ignore="lm_head"), "ignore must be a list of names, got 'lm_head'"),
        (compressed(ignore=["re:("]), r"must be regular expressions, got '\(': "),
        (compressed(config_groups={"FP8": ["Linear"]}), "config_groups must have an object for each group"),
        (FP8 | {"modules_to_not_convert": [1]}, "modules_to_not_convert must be a list of names"),
        (FP8 | {"modules_to_not_convert": ["*.gate"]}, "must be regular expressions"),
        (modelopt("FP8", exclude_modules={"lm_head": 1}), "exclude_modules must be a list of names"),
    ],
)
def test_broken_configurations(configuration: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        how(configuration, UP)


def stored(shape: tuple[int, ...], granularity: Any, name: str, dtype: torch.dtype, scale: Any) -> dict[str, Tensor]:
    weight = quantize(torch.randn(shape), granularity)
    return {"weight": weight.values, name: weight.scale.to(dtype).reshape(scale), "bias": torch.zeros(shape[0])}


@pytest.mark.parametrize(
    ("configuration", "granularity", "name", "dtype", "scale"),
    [
        (compressed(), "row", "weight_scale", torch.bfloat16, (200, 1)),
        (compressed("tensor"), "tensor", "weight_scale", torch.bfloat16, (1,)),
        (compressed("block", {"block_structure": [128, 128]}), "block", "weight_scale", torch.float32, (2, 3)),
        (BLOCKS, "block", "weight_scale_inv", torch.float32, (2, 3)),
        (FP8, "tensor", "weight_scale", torch.float32, ()),
        (FP8, "tensor", "weight_scale_inv", torch.float32, (1, 1)),
        (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "row", "weight_scale", torch.float32, (200,)),
        (modelopt("FP8_PB_WO"), "block", "weight_scale", torch.float32, (2, 1, 3, 1)),
    ],
)
def test_weights(configuration: Any, granularity: str, name: str, dtype: torch.dtype, scale: tuple[int, ...]) -> None:
    scheme = how(configuration, UP)
    assert scheme is not None
    tensors = stored((200, 300), granularity, name, dtype, scale)
    found, inputs = weight_of(scheme, tensors)
    assert (found.granularity, inputs) == (granularity, None)
    assert torch.equal(found.values.view(torch.uint8), tensors["weight"].view(torch.uint8))
    assert torch.equal(found.scale.flatten(), tensors[name].float().flatten())
    with pytest.raises(ValueError, match=f"must be weight and .*{name}.*, got bias, weight$"):
        weight_of(scheme, {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(ValueError, match=f"^weight with .*{name}.*: scale must be"):
        weight_of(scheme, tensors | {name: torch.ones(7)})


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_scales_that_are_powers_of_two(dtype: torch.dtype) -> None:
    scheme = how(BLOCKS | {"scale_fmt": "ue8m0"}, UP)
    exponents = torch.tensor([[127, 126, 120], [130, 127, 1]], dtype=torch.uint8)
    assert scheme is not None
    tensors = {"weight": torch.ones(256, 384).to(E4M3), "weight_scale_inv": exponents.view(dtype)}
    found, _ = weight_of(scheme, tensors)
    assert torch.equal(found.scale, 2.0 ** (exponents.float() - 127))


@pytest.mark.parametrize("name", ["input_scale", "activation_scale"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_static_inputs(name: str, shape: tuple[int, ...]) -> None:
    scheme = how(FP8 | {"activation_scheme": "static"}, UP)
    assert scheme is not None
    tensors = stored((8, 16), "tensor", "weight_scale", torch.float32, ())
    found, inputs = weight_of(scheme, tensors | {name: torch.full(shape, 0.25, dtype=torch.bfloat16)})
    assert found.granularity == "tensor"
    assert inputs is not None
    assert (inputs.dtype, list(inputs.shape), float(inputs)) == (torch.float32, [], 0.25)
    with pytest.raises(
        ValueError, match="must be weight and input_scale or activation_scale, got bias, weight, weight_sc"
    ):
        weight_of(scheme, tensors)
    with pytest.raises(ValueError, match="input_scale or activation_scale: scale must be finite and above 0"):
        weight_of(scheme, tensors | {name: torch.zeros(shape)})


def test_experts() -> None:
    weight = quantize(torch.randn(3, 8, 16), "tensor")
    tensors = {"weight": weight.values, "weight_scale": weight.scale, "input_scale": torch.ones(3, 1)}
    found, inputs = weight_of(Scheme("tensor", inputs=STATIC), tensors)
    assert torch.equal(found.scale, weight.scale)
    assert inputs is not None
    assert inputs.tolist() == [1, 1, 1]


ONES = torch.ones(8, 16)


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"weight": ONES.bfloat16(), "weight_scale": torch.ones(8, 1)}, TypeError, "float8_e4m3fn, got torch.bfloat16"),
        (
            {"weight_packed": ONES, "weight_scale": ONES},
            ValueError,
            "weight and weight_scale, got weight_packed, weight_s",
        ),
        (
            {"weight": ONES.to(E4M3), "weight_scale": torch.ones(())},
            ValueError,
            r"scale must be \[8\] by row .* got \[\]",
        ),
        ({"weight": ONES.to(E4M3), "weight_scale": torch.zeros(8)}, ValueError, "finite and above 0, got 0.0 in 8 of"),
        ({"weight": ONES.to(torch.float8_e5m2), "weight_scale": torch.ones(8)}, TypeError, "got torch.float8_e5m2"),
        ({}, ValueError, "must be weight and weight_scale, got $"),
    ],
)
def test_tensors_that_are_not_what_the_configuration_says(
    tensors: Mapping[str, Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        weight_of(Scheme("row"), tensors)
