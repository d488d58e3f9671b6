"""The environment variables of twell, all read here. Tuning is arguments, never environment.

=================  =========  ==================================================================================
TWELL_CACHE_DIR    a folder   where compiled kernels are kept; default ``$XDG_CACHE_HOME/twell`` or ``~/.cache/twell``
TWELL_LOG          a level    debug, info, warning, error or critical: log to stderr from that level on
TWELL_VLLM         auto, off  whether vLLM serves ReLU models through twell; read when vLLM loads its plug-ins
TWELL_DEBUG        0, 1       synchronise after each kernel, so that a fault surfaces in its own call; read at import
=================  =========  ==================================================================================
"""

import logging
import os
from pathlib import Path

_LEVELS = ("debug", "info", "warning", "error", "critical")


def _choice(name: str, choices: tuple[str, ...], default: str) -> str:
    value = os.environ.get(name) or default
    if value.lower() not in choices:
        raise ValueError(f"environment variable {name} must be one of {', '.join(choices)}, got {value!r}")
    return value.lower()


def cache_dir() -> Path:
    """The folder of the user cache (``TWELL_CACHE_DIR``), an absolute path; it may not exist yet.

    Raises ValueError for a relative path, FileNotFoundError if it is in a home that is not known.
    """
    chosen = os.environ.get("TWELL_CACHE_DIR")
    if chosen:
        folder = _expanded(chosen)
        if not folder.is_absolute():
            raise ValueError(f"environment variable TWELL_CACHE_DIR must be an absolute path, got {chosen!r}")
        return folder
    base = _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    # the XDG specification says to ignore relative paths
    return (base if base.is_absolute() else _expanded("~/.cache")) / "twell"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        # a user without a home, as in containers
        raise FileNotFoundError(f"{error} TWELL_CACHE_DIR can name a folder instead of {path!r}") from error


def log_level() -> int | None:
    """The level from which to log to stderr (``TWELL_LOG``); None leaves logging to the application."""
    if not os.environ.get("TWELL_LOG"):
        return None
    return int(getattr(logging, _choice("TWELL_LOG", _LEVELS, "warning").upper()))


def vllm() -> bool:
    """Whether the plug-in registers its models with vLLM (``TWELL_VLLM``)."""
    return _choice("TWELL_VLLM", ("auto", "off"), "auto") == "auto"


def debug() -> bool:
    """Whether to synchronise after each kernel (``TWELL_DEBUG``)."""
    return _choice("TWELL_DEBUG", ("0", "1"), "0") == "1"
