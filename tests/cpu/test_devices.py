"""torch's default device, which users may set, must not reach any tensor that twell makes."""

import ast
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

K, N = 16, 264
FACTORIES = {getattr(function, "__name__", "") for function in _device_constructors()}


@pytest.mark.parametrize("folder", ["python/twell", "examples", "profiling"])
def test_every_tensor_is_made_on_a_named_device(folder: str, root: Path) -> None:
    """A call without ``device`` would use the default device."""
    files = sorted((root / folder).rglob("*.py"))
    assert files
    found = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and (node.func.value.id, node.func.attr in FACTORIES) == ("torch", True)
                and not any(keyword.arg in ("device", None) for keyword in node.keywords)
            ):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    assert not found
