"""What every command does: help, a request that cannot be met, Ctrl-C, and output that another process stops reading.

``commands.txt`` has requests and the sentence that refuses each, with status 2, before anything is written.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from twell.commands import analyze, cli, serve_check, tune
from twell.commands.demo import demo

ROWS = [
    line.split(" -> ")
    for line in (Path(__file__).parent / "commands.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
# a right request of each, and the function that runs it
COMMANDS: dict[str, tuple[list[str], Any]] = {
    "demo": ([], demo),
    "analyze": (["model", "--text", "notes.txt"], analyze),
    "serve-check": (["model"], serve_check),
    "tune": ([], tune),
}
# words that the help has
HELP = {
    "": "demo info analyze serve-check tune --version",
    "demo": "--text --seconds --steps --seed --l1 --compression Ctrl-C",
    "info": "--json --verbose",
    "analyze": "MODEL --text --csv --plot --activation",
    "serve-check": "MODEL --text",
    "tune": "--shape --kinds --device --budget-s",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders with and without a configuration, and with an index of other files."""
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
    return tmp_path


def status(*arguments: str) -> Any:
    try:
        return cli.main(arguments)
    except SystemExit as stopped:
        return stopped.code


@pytest.mark.parametrize(("request_", "said"), ROWS, ids=[row[0] for row in ROWS])
def test_a_request_that_cannot_be_met_is_one_sentence(request_: str, said: str, folder: Path, capsys: Any) -> None:
    before = sorted(path for path in folder.rglob("*"))
    assert status(*request_.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == said.replace("{folder}", str(folder))
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
