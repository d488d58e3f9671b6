"""Every entry point by every habit: see ``entries`` and ``habits``."""

import ast
import re
from pathlib import Path

import pytest
import torch

from tests.habits.entries import ENTRIES
from tests.habits.habits import HABITS
from tests.habits.refusals import CALLS, sections, wrong

pytestmark = pytest.mark.usefixtures("one_thread")
CELLS = [(name, habit) for name, entry in ENTRIES.items() for habit in HABITS if habit not in entry.absent]


@pytest.mark.parametrize(("entry", "habit"), CELLS)
def test_habit(entry: str, habit: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    HABITS[habit](ENTRIES[entry])


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:.*spectral_norm")
@pytest.mark.parametrize("section", sections())
def test_refusal(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole sentences; the next right call is right, and no file is left."""
    monkeypatch.chdir(tmp_path)
    if found := "\n".join(wrong(section)):
        pytest.fail(found, pytrace=False)
    assert not list(tmp_path.iterdir())


PUBLIC = ("__init__", "nn/__init__", "recipe/__init__", "nn/distributed", *(f"integrations/{name}" for name in (
    "transformers", "sae_lens", "vllm"
)))  # fmt: skip
# what calls return, bases, and classes whose makers have rows
RECORDS = (
    "Analysis Aux CompactionReport Firing Float8 PackedTwell SparseFFN LayerStats SparsityStats "
    "Normalisation DownLayout"
)
ELSEWHERE = {
    "integrations/sae_lens": "neighbours/test_sae_lens.py",
    "integrations/vllm": "cpu/test_vllm_plugin.py",
    "integrations/transformers": "cpu/test_transformers.py",
}


def public(path: Path) -> set[str]:
    """The functions and classes that a file offers: of ``__all__``, or its own."""
    body = ast.parse(path.read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {str(name) for name in ast.literal_eval(node.value)}
    return {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"}


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_a_row(module: str, root: Path) -> None:
    rows = " ".join((*ENTRIES, *CALLS, RECORDS))
    if module in ELSEWHERE:
        rows += (root / "tests" / ELSEWHERE[module]).read_text()
    names = public(root / "python" / "twell" / f"{module}.py")
    assert names
    # submodules, constants, and heads of the classes of transformers
    others = r"[A-Z_]+|__\w+__|nn|ops|Sparse(Llama|Qwen2)\w+"
    assert not {name for name in names if not re.fullmatch(others, name) and not re.search(rf"\b{name}\b", rows)}
