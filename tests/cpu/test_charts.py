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


def test_check_notices_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draw, "CHARTS", tmp_path)
    monkeypatch.setattr(draw, "DIAGRAMS", tmp_path)
    diagram = tmp_path / "format-light.svg"
    diagram.write_text('<rect fill="#ffffff"/>')
    assert draw.main([]) == 0
    # the same bytes each time
    assert draw.main(["--check"]) == 0
    assert (tmp_path / "format-dark.svg").read_text() == '<rect fill="#0d1117"/>'
    pictures = [*draw.drawn()]
    monkeypatch.setattr(draw, "drawn", lambda: iter(pictures))
    path = tmp_path / "speedup-dark.svg"
    text = path.read_text()
    for before, after, status in (("#0d1117", "#0d1118", 1), ("Matplotlib v", "Matplotlib v1.", 0)):
        path.write_text(text.replace(before, after))
        assert draw.main(["--check"]) == status
        assert ("speedup-dark.svg is drawn otherwise now" in capsys.readouterr().err) == bool(status)
    path.unlink()
    assert draw.main(["--check"]) == 1
