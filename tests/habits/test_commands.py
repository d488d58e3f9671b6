"""What every command does: help, a request that cannot be met, Ctrl-C, and output that another process stops reading.

``commands.txt`` has requests and the sentence that refuses each, with status 2, before anything is written. "..." at
its end stands for what another package says. Programs of the checkout are named by their modules. Before a request
there may be changes of the model in "llama": values of its config.json, and contents of files, null for none.
"""

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cpu import saved_models
from twell.commands import analyze, cli, demo, tune

ROWS = [
    (*line.partition(" -> ")[::2],)
    for line in (Path(__file__).parent / "commands.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
# a right request of each, and the function that runs it
COMMANDS: dict[str, tuple[list[str], Any]] = {
    "demo": ([], demo),
    "analyze": (["model", "--text", "notes.txt"], analyze),
    "tune": ([], tune),
}
EXAMPLES = ("train", "relufy")
# words that the help has
HELP = {
    "": "demo info analyze tune --version",
    "demo": "--text --seconds --steps --seed Ctrl-C",
    "info": "--json",
    "analyze": "MODEL --text --serve --json --activation --nnz --ranks --save",
    "tune": "--shape --device --budget-s",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return saved_models.save(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders with and without a configuration, and with an index of other files; texts and a file that is none."""
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "relu"}
    contents = {"source": llama, "bare": None, "full": None, "broken": llama, "outside": llama}
    index = {"broken": "model-00002.safetensors", "outside": "../file.safetensors"}
    for name, settings in contents.items():
        (folder := Path(name)).mkdir()
        (folder / "notes.txt").write_text("mine")
        if settings is not None:
            (folder / "config.json").write_text(json.dumps(settings))
        if name in index:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": index[name]}}))
    Path("lost").symlink_to("no/where")
    for name, text in {
        "empty.txt": b"\n",
        "long.txt": saved_models.text(500).encode(),
        "image.png": b"\x89PNG\xff",
    }.items():
        Path(name).write_bytes(text)
    return tmp_path


def change(model: Path, changes: dict[str, Any]) -> None:
    """Files of a model have other contents, none with None; other names are values of its configuration."""
    config = model / "config.json"
    values = {name: value for name, value in changes.items() if "." not in name}
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    for name in changes.keys() - values:
        (model / name).unlink()
        if changes[name] is not None:
            (model / name).write_text(changes[name])


def status(command: str = "", *arguments: str) -> Any:
    try:
        if "." in command or command in EXAMPLES:
            return importlib.import_module(command).main(list(arguments))
        return cli.main([command, *arguments] if command else [])
    except SystemExit as stopped:
        return stopped.code


@pytest.mark.parametrize(("request_", "said"), ROWS, ids=[row[0] for row in ROWS])
def test_a_request_that_cannot_be_met_is_one_sentence(
    request_: str, said: str, folder: Path, request: pytest.FixtureRequest, capsys: Any
) -> None:
    changes, _, words = request_.rpartition("}: ")
    if "llama" in words:
        shutil.copytree(request.getfixturevalue("llama"), "llama")
        change(Path("llama"), json.loads(f"{changes}}}" if changes else "{}"))
    before = sorted(path for path in folder.rglob("*"))
    assert status(*words.split()) == 2
    printed = capsys.readouterr()
    expected, more, _ = said.replace("{folder}", str(folder)).partition("...")
    last = printed.err.splitlines()[-1]
    assert last == expected if not more else last.startswith(expected)
    assert not printed.out
    assert sorted(path for path in folder.rglob("*")) == before


@pytest.mark.parametrize("command", HELP)
def test_help_names_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*command.split(), "--help") == 0
    printed = capsys.readouterr().out
    assert not [word for word in HELP[command].split() if word not in printed]


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_exits_130(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, module = COMMANDS[command]

    def run(request: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", run)
    assert status(command, *arguments) == 130
    assert f"twell {command}: interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_leaves_is_no_error(command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    arguments, module = COMMANDS[command]
    monkeypatch.setattr(module, "run", lambda request: print("a line") or 0)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert status(command, *arguments) == 1
    assert not capsys.readouterr().err
