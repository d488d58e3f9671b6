"""``twell.analyze``: the zeros of a model's feed-forward layers, and the time that they would save."""

from twell.integrations.analyze.report import Analysis, analyze

__all__ = ["Analysis", "analyze"]
