"""profiling/draw: pictures and their check."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from profiling import draw


@pytest.mark.nightly
def test_tracked_pictures_show_the_results(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m profiling.draw`` makes this pass again."""
    assert draw.main(["--check"]) == 0, capsys.readouterr().err
    names = {path.name.rpartition("-")[0] for path in (root / "profiling" / "charts").glob("*.svg")}
    # frozen
    assert names == {"speedup", "nnz", "relufy"}
