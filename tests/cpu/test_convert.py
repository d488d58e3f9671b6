"""Converting checkpoints between layouts: bytes, configurations, refusals, and conversions that do not finish."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("safetensors")

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from twell.commands import cli, convert
from twell.commands.request import REFUSALS
from twell.integrations import layouts
from twell.integrations.layouts import LAYOUT_KEY

K, N = 8, 12


def tensors(hidden: int = K, intermediate: int = N, layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> Any:
    generator = torch.Generator().manual_seed(hidden + intermediate)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    state = {"model.embed_tokens.weight": draw(16, hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(layers):
        mlp = f"model.layers.{layer}.mlp."
        state[mlp + "gate_proj.weight"] = draw(intermediate, hidden)
        state[mlp + "up_proj.weight"] = draw(intermediate, hidden)
        state[mlp + "down_proj.weight"] = draw(hidden, intermediate)
        state[f"model.layers.{layer}.self_attn.q_proj.weight"] = draw(hidden, hidden)
    return state


def config(**changes: Any) -> dict[str, Any]:
    base = {"architectures": ["LlamaForCausalLM"], "hidden_act": "relu", "hidden_size": K, "intermediate_size": N}
    return {**base, "model_type": "llama", "tie_word_embeddings": True} | changes


def write(
    folder: Path, state: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None, shards: int = 1
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings or config(), indent=2) + "\n")
    (folder / "tokenizer.json").write_text("{}")
    if shards == 1:
        save_file(dict(state), folder / "model.safetensors", {"format": "pt", "origin": "test"})
        return folder
    names = list(state)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: state[name] for name in names[shard::shards]}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names[shard::shards], file)
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in layouts.weight_files(folder) for name, tensor in load_file(path).items()}


def run(source: Path, target: Path, *options: str) -> None:
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    assert convert.run(parser.parse_args([str(source), str(target), *options])) == 0


def settings_of(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return settings


def as_rows(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with down weights by rows."""
    return {name: t.t().contiguous() if layouts.is_down(name) else t for name, t in state.items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.shape == other[name].shape, name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)), name


# conversions


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_become_linear(shards: int, tmp_path: Path) -> None:
    state = tensors()
    source = write(tmp_path / "source", as_rows(state), config() | {LAYOUT_KEY: "rows"}, shards=shards)
    # names of folders have dots
    out = tmp_path / "Qwen2.5-0.5B"
    run(source, out)
    same(read(out), state)
    # the shape says so
    assert settings_of(out) == config()
    # nothing to do is a copy, also to an empty folder
    (tmp_path / "there.txt").mkdir()
    for name in ("llama.rows", "there.txt"):
        run(out, tmp_path / name)
        assert contents(tmp_path / name) == contents(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, "llama.rows", "source", "there.txt"]


def test_odd_tensors_are_copied_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NaNs with a payload, dtypes unknown to torch or numpy, empty tensors, scalars, any names; both layouts."""
    state = tensors() | {
        "model.layers.0.mlp.down_proj.bias": torch.tensor([0x7FC1, -0x3F], dtype=torch.int16).view(torch.bfloat16),
        "model.rotary_emb.inv_freq": torch.tensor([float("nan"), -0.0, float("inf")]),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "eight": torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
        'quote" \\ é': torch.zeros(1, dtype=torch.int8),
        "phase": torch.zeros(3, dtype=torch.complex64),
        "wide": torch.arange(3).to(torch.uint64),
    }
    name = "model.layers.1.mlp.down_proj.weight"
    state[name].view(torch.int16)[0, :2] = torch.tensor([0x7FC1, -0x3F])
    # each down weight is known by its shape
    source = write(tmp_path / "mixed", state | {name: state[name].t().contiguous()})
    run(source, tmp_path / "linear")
    same(read(tmp_path / "linear"), state)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "down_proj.weight" in line]
    assert sorted(line[5] for line in lines) == ["linear", "rows"]


def test_a_file_loses_its_marker_and_keeps_dtypes_that_torch_does_not_know(tmp_path: Path) -> None:
    save_file(as_rows(tensors()), tmp_path / "a.safetensors", {LAYOUT_KEY: "rows"})
    header = layouts.read_header(tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    start = min(stored.start for stored in header.tensors.values())
    entries = [(n, s.dtype, s.shape, s.start - start, s.stop - start) for n, s in header.tensors.items()]
    end = len(data) - start
    scales = layouts.header_bytes({LAYOUT_KEY: "rows"}, [*entries, ("scale", "F8_E8M0", (3,), end, end + 3)])
    (tmp_path / "a.safetensors").write_bytes(scales + data[start:] + b"\x01\x02\xff")
    run(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    written = layouts.read_header(tmp_path / "b.safetensors")
    scale = written.tensors["scale"]
    assert (scale.dtype, scale.shape) == ("F8_E8M0", (3,))
    assert (tmp_path / "b.safetensors").read_bytes()[scale.start : scale.stop] == b"\x01\x02\xff"
    run(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_square_weights_need_to_be_told(tmp_path: Path) -> None:
    state = tensors(K, K)
    source = write(tmp_path / "source", as_rows(state), config(intermediate_size=K))
    with pytest.raises(REFUSALS, match=r"layers.0.mlp.down_proj.weight: a square down weight \[8, 8\] may be"):
        run(source, tmp_path / "linear", "--model-type", "sparse_llama")
    run(source, tmp_path / "linear", "--source-layout", "rows")
    # from here on the marker tells the layout
    run(tmp_path / "linear", tmp_path / "again")
    for name in ("linear", "again"):
        same(read(tmp_path / name), state)
        assert set(layouts.folder_layouts(tmp_path / name).values()) == {"linear"}
        assert settings_of(tmp_path / name)[LAYOUT_KEY] == "linear"
        assert metadata(tmp_path / name / "model.safetensors")[LAYOUT_KEY] == "linear"
    # a file of one layout and a configuration of the other
    (tmp_path / "again" / "config.json").write_text(json.dumps(config(intermediate_size=K) | {LAYOUT_KEY: "rows"}))
    with pytest.raises(REFUSALS, match="must be the same in the configuration and in the file's metadata"):
        run(tmp_path / "again", tmp_path / "other")


def test_source_layout_does_not_overrule_shapes(tmp_path: Path) -> None:
    source = write(tmp_path / "source", tensors(), config() | {LAYOUT_KEY: "rows"})
    with pytest.raises(REFUSALS, match=r"must be \[12, 8\], got \[8, 12\]"):
        run(source, tmp_path / "out")
    with pytest.raises(REFUSALS, match=r"--source-layout rows: .* must be \[12, 8\], got \[8, 12\]"):
        run(source, tmp_path / "out", "--source-layout", "rows")
    run(source, tmp_path / "out", "--source-layout", "linear")
    assert settings_of(tmp_path / "out") == config()


def test_quantised_down_projections_are_refused(tmp_path: Path) -> None:
    state = tensors()
    name = "model.layers.0.mlp.down_proj.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)
    with pytest.raises(REFUSALS, match=r"must be of F64, F32, F16, BF16 to be transposed, got F8_E4M3"):
        run(write(tmp_path / "rows", as_rows(state)), tmp_path / "out")
    run(write(tmp_path / "source", state), tmp_path / "out")
    same(read(tmp_path / "out"), state)


# other files


def test_other_files_are_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", tensors())
    for name in ("tokenizer.model", "assets/logo.png", "LICENSE", "chat_template.jinja"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(os.urandom(32))
    left = ("pytorch_model.bin", "optimizer.pt", "model.gguf", "consolidated.safetensors", "checkpoint-5/optimizer.pt")
    for name in (*left, "checkpoint-5/config.json", ".git/HEAD", ".cache/x/y", "pytorch_model.bin.index.json"):
        (source / name).parent.mkdir(exist_ok=True, parents=True)
        (source / name).write_bytes(b"x")
    os.chmod(source / "LICENSE", 0o600)
    run(source, tmp_path / "out")
    kept = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "LICENSE", "chat_template.jinja"}
    written = contents(tmp_path / "out")
    assert written == {name: data for name, data in contents(source).items() if name in kept | {"assets/logo.png"}}
    assert (tmp_path / "out" / "LICENSE").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "out").stat().st_mode & 0o777 == source.stat().st_mode & 0o777
    (said,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("left out:"))
    assert all(name in said for name in ("checkpoint-5/", ".git/", *left[:4]))


def test_links_of_a_download_cache_are_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blobs = write(tmp_path / "blobs", tensors())
    source = tmp_path / "snapshots" / "abc"
    source.mkdir(parents=True)
    for path in blobs.iterdir():
        (source / path.name).symlink_to(os.path.relpath(path, source))
    run(source, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert "copied as files" not in capsys.readouterr().out
    assert contents(tmp_path / "out") == contents(blobs)


def test_links_are_copied_as_files_or_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", tensors())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "notes.txt").write_text("mine")
    (source / "assets").mkdir()
    (source / "assets" / "logo.txt").write_text("logo")
    links = {
        "within.txt": "tokenizer.json",
        "out.txt": "../elsewhere/notes.txt",
        "assets/out.txt": "../../elsewhere/notes.txt",
        "loop": ".",
        "assets/loop": "..",
        "folder": "../elsewhere",
        "nowhere": "missing",
        "itself": "itself",
    }
    for name, to in links.items():
        (source / name).symlink_to(to)
    os.mkfifo(source / "pipe")
    run(source, tmp_path / "out")
    copied = {"within.txt": b"{}", "out.txt": b"mine", "assets/out.txt": b"mine", "assets/logo.txt": b"logo"}
    written = contents(tmp_path / "out")
    assert written.keys() == {"config.json", "model.safetensors", "tokenizer.json", *copied}
    assert {name: written[name] for name in copied} == copied
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    lines = capsys.readouterr().out.splitlines()
    (left,) = (line for line in lines if line.startswith("left out: "))
    names = ("assets/loop", "folder", "itself", "loop", "nowhere")
    assert left == "left out: " + ", ".join([*(f"{name} -> {links[name]}" for name in names), "pipe"])
    (followed,) = (line for line in lines if line.startswith("copied as files: "))
    assert followed == "copied as files: " + ", ".join(
        f"{name} -> {links[name]}" for name in ("assets/out.txt", "out.txt")
    )


# the configuration

PAPER = {"sparsity_gated_mlp": True, "sparsity_new_intermediate_size": N, "sparsity_use_hybrid_kernel": True}


@pytest.mark.parametrize(("was", "model_type"), [("llama", "llama"), ("llama_sparse_relu", "sparse_llama")])
def test_the_configuration_of_the_published_models(was: str, model_type: str, tmp_path: Path) -> None:
    """Their activation is ReLU whatever hidden_act says; they have their own class and key for N."""
    theirs = config(model_type=was, hidden_act="silu", intermediate_size=99, auto_map={"AutoConfig": "x.Y"}) | PAPER
    source = write(tmp_path / "source", as_rows(tensors()), theirs)
    run(source, tmp_path / "out", "--model-type", model_type)
    name = "Sparse" * (model_type == "sparse_llama") + "LlamaForCausalLM"
    changed = {"model_type": model_type, "architectures": [name], "hidden_act": "relu", "intermediate_size": N}
    expected = {key: value for key, value in theirs.items() if key != "auto_map"} | changed
    if model_type == "sparse_llama":
        expected[LAYOUT_KEY] = "linear"
    assert settings_of(tmp_path / "out") == expected
    same(read(tmp_path / "out"), tensors())


@pytest.mark.parametrize(
    ("changes", "extra", "model_type", "message"),
    [
        ({"hidden_act": "silu"}, {}, "llama", r"expected a model trained with it .* got hidden_act 'silu'"),
        ({"hidden_act": "silu", LAYOUT_KEY: "linear"}, {}, "sparse_llama", r"got hidden_act 'silu'"),
        ({"hidden_act": "fatrelu", "sparsity_gated_mlp": True}, {}, "llama", r"got hidden_act 'fatrelu'"),
        ({}, {}, "qwen2", r"expected a model of type qwen2, sparse_qwen2, qwen2_sparse_relu, got 'llama'"),
        ({"model_type": "mistral"}, {}, "llama", r"expected a model of type llama, .*, got 'mistral'"),
        ({"architectures": ["LlamaForTokenClassification"]}, {}, "llama", r"ForCausalLM, got \['LlamaForTokenClass"),
        ({}, {"model.layers.2.mlp.up_proj.weight": [N, K], "model.layers.2.mlp.down_proj.weight": [K, N]}, "llama",
         r"gated layers: expected model.layers.2.mlp.gate_proj.weight, got none"),
        ({}, {f"model.layers.2.mlp.{n}_proj.weight": [K, 4] if n == "down" else [4, K] for n in ("up", "gate", "down")},
         "llama", r"has one intermediate_size: got layers of \[4, 12\] neurons"),
        ({"model_type": "qwen2"}, {"model.layers.0.mlp.up_proj.bias": [N]}, "qwen2", "has no biases in its FFN"),
    ],
)  # fmt: skip
def test_configurations_that_would_lie_are_refused(
    changes: dict[str, Any], extra: dict[str, list[int]], model_type: str, message: str, tmp_path: Path
) -> None:
    state = tensors() | {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in extra.items()}
    source = write(tmp_path / "source", state, config(**changes))
    with pytest.raises(REFUSALS, match=message):
        run(source, tmp_path / "out", "--model-type", model_type)
    assert not (tmp_path / "out").exists()


def test_an_activation_that_is_not_relu_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any]
    for number, (changes, named) in enumerate(
        (
            ({"hidden_act": "silu"}, "has the activation 'silu'"),
            ({"hidden_activation": "gelu_pytorch_tanh"}, "has the activation 'gelu_pytorch_tanh'"),
            ({"text_config": {"activation_function": "relu2"}}, "has the activation 'relu2'"),
            ({"hidden_act": None}, "does not name its activation"),
            ({"hidden_act": None, "model_type": "sparse_llama"}, ""),
            ({"hidden_act": "silu"} | PAPER, ""),
            ({}, ""),
        )
    ):
        source = write(tmp_path / f"source{number}", tensors(), config(**changes))
        run(source, tmp_path / f"linear{number}")
        error = capsys.readouterr().err
        assert error.count("warning: config.json") == bool(named)
        assert named in error


def test_gates_and_biases_reach_the_configuration(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in tensors().items() if "gate" not in name}
    state["model.layers.0.mlp.up_proj.bias"] = torch.zeros(N, dtype=torch.bfloat16)
    run(write(tmp_path / "source", state), tmp_path / "out", "--model-type", "sparse_llama")
    found = settings_of(tmp_path / "out")
    assert (found["sparsity_gated_mlp"], found["intermediate_size"], found["mlp_bias"]) == (False, N, True)


def store_rows(source: Path, target: Path) -> Path:
    """A copy of a folder with down weights by rows, and the marker."""
    shutil.copytree(source, target)
    for path in layouts.weight_files(target):
        save_file(as_rows(load_file(path)), path, {"format": "pt", LAYOUT_KEY: "rows"})
    (target / "config.json").write_text(json.dumps(settings_of(source) | {LAYOUT_KEY: "rows"}))
    return target


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
def test_stock_transformers_computes_the_same(family: str, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    settings = transformers.AutoConfig.for_model(
        family, num_hidden_layers=2, vocab_size=64, tie_word_embeddings=tied, hidden_act="relu", **sizes
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings).eval()
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    run(store_rows(tmp_path / "source", tmp_path / "rows"), tmp_path / "sparse", "--model-type", f"sparse_{family}")
    run(tmp_path / "sparse", tmp_path / "linear", "--model-type", family)
    same(read(tmp_path / "linear"), read(tmp_path / "source"))
    ids = torch.arange(24).view(2, 12)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "linear").eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_opt(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_attention_heads": 2, "vocab_size": 32, "word_embed_proj_dim": 16}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(num_hidden_layers=2, **sizes))
    model.save_pretrained(tmp_path / "source")
    run(store_rows(tmp_path / "source", tmp_path / "rows"), tmp_path / "linear")
    same(read(tmp_path / "linear"), read(tmp_path / "source"))


# impossible requests


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "source", tensors())
    assert cli.main(["convert", "source", "right"]) == 0
    same(read(Path("right")), tensors())


def test_files_that_appear_in_the_target_meanwhile_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write(tmp_path / "source", tensors()), tmp_path / "out"
    original = convert._write_rest

    def late(*arguments: Any) -> None:
        (out / "checkpoint-1").mkdir(parents=True)
        (out / "checkpoint-1" / "optimizer.pt").write_bytes(b"precious")
        original(*arguments)

    monkeypatch.setattr(convert, "_write_rest", late)
    with pytest.raises(REFUSALS, match=r"must be new or empty, got .* with 'checkpoint-1'"):
        run(source, out)
    assert (out / "checkpoint-1" / "optimizer.pt").read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_dry_run_writes_nothing_and_says_what_it_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", as_rows(tensors()), config() | {LAYOUT_KEY: "rows"})
    before = contents(tmp_path)
    run(source, tmp_path / "deep" / "out", "--dry-run")
    assert contents(tmp_path) == before
    assert not (tmp_path / "deep").exists()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("1.7 kB in 1 file")
    (down,) = (line.split() for line in lines if "down_proj" in line)
    assert down == "model.layers.*.mlp.down_proj.weight 2 BF16 [12, 8] rows linear [8, 12]".split()
    (norm,) = (line.split() for line in lines if "norm" in line)
    assert norm == "model.norm.weight 1 F32 [8] the same".split()
    assert 'config.json: sparsity_down_layout: "rows" -> none' in lines
    # impossible requests are refused before writing
    with pytest.raises(REFUSALS, match="DST must be apart"):
        run(source, source, "--dry-run")


# conversions that do not finish


def test_what_a_killed_conversion_left_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", tensors(), shards=2)
    left = tmp_path / ".out.partial-0a1b2c3d"
    shutil.copytree(source, left)
    run(source, tmp_path / "out")
    same(read(tmp_path / "out"), tensors())
    assert f"{left} was left by a conversion that was interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "at", "error"),
    [
        ("folder", 0, OSError(28, "No space left on device")),
        ("file", 1, OSError(28, "No space left on device")),
        ("folder", 1, KeyboardInterrupt("by hand")),
    ],
)
def test_a_full_disk_or_ctrl_c_leaves_everything_as_it_was(
    form: str, at: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes at the first tensor or at a later one."""
    source, target = write(tmp_path / "source", as_rows(tensors())), tmp_path / "out"
    if form == "file":
        source, target = source / "model.safetensors", tmp_path / "out.safetensors"
    before = contents(tmp_path)
    original, calls = convert._converted, itertools.count()

    def counted(*arguments: Any) -> Any:
        if next(calls) == 3 * at:
            raise error
        return original(*arguments)

    monkeypatch.setattr(convert, "_converted", counted)
    full = r"^no space left in .*: DST needs 1.\d+ kB; nothing there has changed$"
    with pytest.raises((*REFUSALS, KeyboardInterrupt), match=full if isinstance(error, OSError) else "by hand"):
        run(source, target)
    assert contents(tmp_path) == before
    assert not any(path.name.startswith(".") for path in tmp_path.rglob("*"))


def test_too_little_space_is_noticed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", tensors())
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(REFUSALS, match=r"DST needs 1.7 kB, got 1 kB free in"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("by_rows", "message"),
    [(True, r"ended within '.*'; was it written to meanwhile"), (False, "must be a safetensors")],
)
def test_a_source_that_is_cut_meanwhile_is_noticed(
    by_rows: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", as_rows(tensors()) if by_rows else tensors())
    original = convert._write

    def cut(*arguments: Any) -> None:
        path = source / "model.safetensors"
        os.truncate(path, path.stat().st_size - 8)
        original(*arguments)

    monkeypatch.setattr(convert, "_write", cut)
    with pytest.raises(REFUSALS, match=message):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_only_the_index_names_is_missed(tmp_path: Path) -> None:
    """It was dropped: DST had neither the tensor nor its name."""
    source = write(tmp_path / "source", tensors(), config(tie_word_embeddings=False), shards=2)
    index = json.loads((source / layouts.INDEX).read_text())
    file = next(iter(index["weight_map"].values()))
    index["weight_map"]["lm_head.weight"] = file
    (source / layouts.INDEX).write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=f"each tensor that its index names, got none for 'lm_head.weight' in '{file}'"
    ):
        run(source, tmp_path / "out")
    # the head of a tied model is its embedding
    (source / "config.json").write_text(json.dumps(config()))
    run(source, tmp_path / "out")
    same(read(tmp_path / "out"), tensors())


def test_memory_holds_one_tensor_at_a_time(tmp_path: Path, environment: dict[str, str]) -> None:
    """A model of 48 MB in tensors of 4 MB."""
    state = {
        f"layers.{layer}.mlp.{name}_proj.weight": torch.full(shape, layer, dtype=torch.bfloat16)
        for layer in range(4)
        for name, shape in (("up", (2048, 1024)), ("gate", (2048, 1024)), ("down", (2048, 1024)))
    }
    save_file(state, tmp_path / "a.safetensors")
    del state
    code = """
import resource, sys
from pathlib import Path
from twell.commands import convert
import safetensors, tqdm
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert.convert(Path(sys.argv[1]), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 24_000


def test_missing_packages_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", tensors())
    for name in ("tqdm", "safetensors"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(REFUSALS, match=rf"{name}.* pip install 'twell\[hf\]'"):
            run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
