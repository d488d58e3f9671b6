"""The pages build without a warning, name everything public, and their examples run."""

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import twell
from profiling import draw, everything, reference
from twell.commands import cli, info
from twell.runtime import env

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# pages whose blocks and commands are tried
TRIED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
LINKED = [*TRIED, ROOT / "AGENTS.md", ROOT / "profiling" / "results" / "README.md"]
DOCUMENTED = (
    *("twell", "twell.nn", "twell.recipe", "twell.integrations.transformers", "twell.nn.distributed"),
    *("twell.testing", "twell.ops.reference"),
)
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Block(NamedTuple):
    """A fenced block: its language, first line, content and the line before it."""

    kind: str
    line: int
    text: str
    before: str


def blocks(path: Path) -> list[Block]:
    found: list[Block] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    fence, start = "", 0
    for number, line in enumerate(lines):
        opened = re.match(r"\s*(`{3,})([^`]*)$", line)
        if not fence and opened:
            fence, kind, start = opened[1], opened[2].strip(), number
        elif fence and line.strip() == fence:
            before = lines[start - 1] if start else ""
            found.append(Block(kind, start + 2, "\n".join(lines[start + 1 : number]), before))
            fence = ""
    assert not fence, f"{path}:{start + 1}: the block does not end"
    return found


def prose(path: Path) -> str:
    text = re.sub(r"(?ms)^\s*(`{3,}).*?^\s*\1$", "", path.read_text(encoding="utf-8"))
    return re.sub(r"(?<!\})`[^`\n]+`", "", text)


def headings(path: Path) -> set[str]:
    text = re.sub(r"(?ms)^(`{3,}).*?^\1$", "", path.read_text(encoding="utf-8"))
    titles = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# The build


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the extra docs is not installed: no {', '.join(missing)}")
    pytest.importorskip("transformers", reason="the pages document twell.integrations.transformers")
    out = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(out / "doctrees")]
    # a closed port as proxy: no site can be reached
    network = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    built = subprocess.run(
        [*command, str(DOCS), str(out / "html")], cwd=ROOT, env=os.environ | network, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-6000:]
    return out / "html"


def documented(site: Path) -> set[str]:
    content = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = zlib.decompress(content).decode().splitlines()
    return {line.split(" ", 1)[0] for line in lines if " py:" in line}


@pytest.mark.nightly
def test_pages_build_without_a_warning_and_document_every_public_name(site: Path) -> None:
    assert (site / "index.html").stat().st_size > 1000
    assert (site / "search.html").exists()
    found = documented(site)
    for name in DOCUMENTED:
        module = importlib.import_module(name)
        # constants have no docstrings
        expected = [each for each in reference.public(module) if callable(getattr(module, each))]
        assert expected
        # names that the package exports too are documented there
        own = {
            f"{'twell' if getattr(twell, each, None) is getattr(module, each) else name}.{each}" for each in expected
        }
        assert own <= found, f"not in docs/docstrings.rst: {', '.join(sorted(own - found))}"


# Operators, variables, commands


def section(path: Path, title: str) -> str:
    text = path.read_text(encoding="utf-8")
    found = re.search(rf"(?ms)^## {re.escape(title)}$(.*?)(?=^## |\Z)", text)
    assert found, f"{path}: no section {title!r}"
    return found[1]


def test_the_help_of_each_operator_has_all_that_its_schema_names() -> None:
    registered = {
        name.removeprefix("twell::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("twell::")
    }
    assert sorted(registered) == sorted(twell.ops.__all__)

    def described(op: str, seen: set[str]) -> set[str]:
        """The words of an operator's docstring, and of those of the operators that it names."""
        seen.add(op)
        text, _, schema = getattr(twell.ops, op).__doc__.rstrip().rpartition("\n\n")
        assert schema.startswith("twell::")
        words = set(re.findall(r"\w+", text))
        return words.union(*(described(each, seen) for each in registered & words - seen))

    for op in registered:
        schema = getattr(torch.ops.twell, op).default._schema
        words = {each.name for each in (*schema.arguments, *schema.returns) if each.name}
        missing = words - described(op, set())
        assert not missing, f"{op}: {', '.join(sorted(missing))}"


def test_the_page_of_commands_has_the_variables_that_are_read() -> None:
    source, page = Path(env.__file__).read_text(), DOCS / "command-line.md"
    rows = dict(re.findall(r"(?m)^\| `(TWELL_\w+)` \| (.*?) \|", section(page, "Environment variables")))
    assert sorted(rows) == sorted(set(re.findall(r'"(TWELL_\w+)"', source))) == sorted(info.VARIABLES)
    choices = re.findall(r'_choice\("(TWELL_\w+)", (\(.*?\)|\w+)', source)
    assert len(choices) == 3
    for variable, written in choices:
        values = getattr(env, written) if written.isidentifier() else ast.literal_eval(written)
        assert set(re.findall(r"`(\w+)`", rows[variable])) == set(values), variable


def test_install_page_has_the_extras() -> None:
    wanted = re.search(r"(?ms)^\[project\.optional-dependencies\]$(.*?)^\[", (ROOT / "pyproject.toml").read_text())
    assert wanted
    rows = re.findall(r"(?m)^\| `(\w+)` \|", section(DOCS / "install.md", "From a checkout"))
    assert sorted(rows) == sorted(re.findall(r"(?m)^(\w+) = \[", wanted[1]))


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def test_each_command_has_its_section() -> None:
    text = (DOCS / "command-line.md").read_text(encoding="utf-8")
    shown = re.findall(r"(?m)^## twell ([\w -]+)$", text)
    assert set(shown) == set(commands(cli.parser()))
    assert re.findall(r"<!-- table: command ([\w -]+) -->", text) == shown


def test_citations_name_this_version_and_its_date() -> None:
    citation = ROOT / "CITATION.cff"
    if not citation.exists():
        pytest.skip("an archive of the sources without it")
    text = citation.read_text(encoding="utf-8")
    assert f"\nversion: {twell.__version__}\n" in text
    # above it may be what is not released yet
    first = re.search(r"(?m)^## \d.*$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    heading = first and re.fullmatch(r"## \S+ - (\S+)", first[0])
    released = re.search(r"(?m)^date-released: (\S+)$", text)
    assert (heading and heading[1]) == (released and released[1])


def test_the_changelog_begins_with_this_version() -> None:
    """Versions fall, each with a date except for one that is not released yet; kinds are those of Keep a Changelog."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    text = re.sub(r"\n## Unreleased\n(?s:.*?)(?=\n## )", "", text, count=1)
    headings = re.findall(r"(?m)^## (.*)$", text)
    found = [re.fullmatch(r"(\d+\.\d+\.\d+)(?: - \d{4}-\d\d-\d\d|, not released yet)?", each) for each in headings]
    assert all(found), headings
    versions = [match[1] for match in found if match]
    assert versions[0] == twell.__version__
    assert versions == sorted(set(versions), key=lambda version: tuple(map(int, version.split("."))), reverse=True)
    assert not [each for each in headings[1:] if "not released" in each]
    kinds = re.findall(r"(?m)^### (.*)$", text.split(f"## {versions[1]}")[0])
    assert kinds == [
        kind for kind in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security") if kind in kinds
    ]
    # a list has no gap, which splits it
    assert not re.search(r"(?m)^- .*\n(?:  .*\n)*\n- ", text)


def test_dark_diagrams_are_the_light_ones_in_other_colours() -> None:
    """``python -m profiling.draw`` makes this pass again."""
    light = sorted((DOCS / "figures").glob("*-light.svg"))
    assert len(light) == 4
    for path in light:
        assert draw.darkened(path.read_text()) == path.with_name(path.name.replace("-light", "-dark")).read_text()


# Links, blocks, commands of the pages


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_links_lead_somewhere_and_pages_are_whole_on_github(path: Path) -> None:
    """It shows directives, roles and tables without a delimiter for each column as they are written."""
    text = prose(path)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    targets += re.findall(r"\{download\}`[^<`]*<([^>]+)>`", text)
    targets += re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    dead = []
    for target in targets:
        file, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        found = path if not file else (path.parent / file).resolve()
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in headings(found)):
            dead.append(target)
    assert not dead
    text = path.read_text(encoding="utf-8")
    if path in PAGES:
        # it leaves out those in a comment
        shown = re.sub(r"(?s)<!-- sphinx\n.*?-->", "", text)
        assert not re.findall(r"```\{.*|\{(?:doc|download|ref|py:\w+)\}`.*", shown)
    for header, rule in itertools.pairwise(text.splitlines()):
        if re.fullmatch(r"\|(:?-+:?\|)+", rule.replace(" ", "")):
            columns = len(re.findall(r"(?<!\\)\|", header)) - 1
            assert rule.count("|") - 1 == columns, f"{header}\n{rule}"


@pytest.mark.parametrize("path", TRIED, ids=name_of)
def test_python_blocks_run_on_the_cpu(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page share a namespace. One that cannot run says so above, and its names exist."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "page"}
    imports: list[ast.stmt] = []
    for block in blocks(path):
        if block.kind != "python":
            continue
        where = f"{name_of(path)}:{block.line}"
        tree = ast.parse(block.text)
        imports += [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        run = not NOT_RUN.match(block.before)
        text = "\n" * (block.line - 1) + block.text if run else used(imports, tree)
        for package in ("transformers", "sae_lens"):
            if package in text:
                pytest.importorskip(package)
        try:
            exec(compile(text, where, "exec"), namespace if run else {})
        except Exception as error:
            raise AssertionError(f"{where} does not run; mark it <!-- not run: REASON --> if it cannot") from error


def used(imports: list[ast.stmt], tree: ast.Module) -> str:
    """Return code of the imports and of all dotted names that use them."""
    known = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}  # type: ignore[attr-defined]
    dotted = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Attribute, ast.Name))}
    names = sorted(name for name in dotted if re.fullmatch(r"[\w.]+", name) and name.partition(".")[0] in known)
    return "\n".join([*(ast.unparse(node) for node in imports), *names])


class Command(NamedTuple):
    where: str
    words: list[str]


def shell_commands(path: Path) -> Iterator[Command]:
    """Return the commands of a page's ``sh`` blocks, without comments, leading variables and launchers."""
    for block in blocks(path):
        if block.kind != "sh":
            continue
        text = re.sub(r"\\\n\s*", lambda _: " ", block.text)
        for number, line in enumerate(text.splitlines()):
            for part in re.split(r"\s(?:;|&&|\|)\s", line):
                words = shlex.split(part, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words and words[0] == "torchrun":
                    words = ["python", *words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]]
                if words and words[0] == "bundle/run.sh":
                    words.pop(0)
                if words and words[0] == "compute-sanitizer":
                    words = words[next(i for i, word in enumerate(words) if word == "python") :]
                if words:
                    yield Command(f"{name_of(path)}:{block.line + number}: {' '.join(words)}", words)
    # in text and tables; a bare name is no command
    text = re.sub(r"(?ms)^(`{3,}).*?^\1$", "", path.read_text(encoding="utf-8"))
    for span in re.findall(r"(?<!`)`((?:python|twell|make) [^`]+)`", text):
        words = shlex.split(span.removeprefix("python -m ") if span.startswith("python -m twell") else span)
        if words[0] != "twell" or len(words) > 2:
            yield Command(f"{name_of(path)}: {span}", words)


@functools.cache
def script_help(script: str, *command: str) -> str:
    printed, saved = io.StringIO(), (sys.argv, sys.path[:])
    # modules of the checkout run from its root, others from their folder
    module = script.startswith(("profiling", "tests"))
    sys.argv, sys.path[:0] = [script, *command, "--help"], [] if module else [str((ROOT / script).parent)]
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = saved
    return printed.getvalue()


def complaint(words: list[str]) -> str:
    """Return the parser's complaint about a command; empty if there is none."""
    name, *rest = words
    if name in ("python", "python3") and rest[:2] == ["-m", "twell"]:
        name, rest = "twell", rest[2:]
    if name == "twell":
        said, parse = io.StringIO(), cli.parser().parse_args
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                parse(rest)
            except SystemExit as stopped:
                return said.getvalue().strip() if stopped.code else ""
        return ""
    if name == "make":
        targets = re.findall(r"(?m)^([a-z0-9-]+):", (ROOT / "Makefile").read_text())
        return "" if not rest or rest[0] in targets else f"make has no target {rest[0]}"
    if name in ("python", "python3") and rest[:1] == ["-m"] and rest[1].startswith(("profiling", "tests")):
        # a script of the checkout
        file = ROOT / rest[1].replace(".", "/")
        file = file / "__main__.py" if file.is_dir() else file.with_suffix(".py")
        rest = [str(file.relative_to(ROOT)), *rest[2:]]
    if name in ("python", "python3") and rest[:1] in (["-m"], ["-c"]):
        return "" if rest[0] == "-c" or importlib.util.find_spec(rest[1]) else f"no module {rest[1]}"
    if name in ("python", "python3"):
        if not (ROOT / rest[0]).is_file():
            return f"no file {rest[0]}"
        # a package may have commands with options of their own
        named = rest[1:2] if rest[0].endswith("__main__.py") else []
        printed = script_help(rest[0], *(word for word in named if not word.startswith("-")))
        missing = [word for word in rest[1:] if word.startswith("--") and word.partition("=")[0] not in printed]
        return f"{rest[0]} has no {', '.join(missing)}" if missing else ""
    if (ROOT / name).is_file():
        return ""
    return "" if name in ("pip", "export", "source", "git", "cd", "cp", "vllm") else f"unknown command {name}"


def test_measurements_are_made_by_commands_that_there_are() -> None:
    given = [shlex.split(command) for each in everything.ALL for command in each.commands]
    # torch.distributed.run has its module behind options of its own
    words = [["python", *each[each.index("-m", 3) :]] if "torch.distributed.run" in each else each for each in given]
    wrong = {" ".join(each): complaint(each) for each in words}
    assert not {command: said for command, said in wrong.items() if said}


@pytest.mark.parametrize("path", TRIED, ids=name_of)
def test_commands_are_accepted_by_their_parsers(path: Path) -> None:
    wrong = {command.where: complaint(command.words) for command in shell_commands(path)}
    assert not {where: said for where, said in wrong.items() if said}
