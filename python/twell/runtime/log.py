"""The logger ``twell`` of the standard library's logging."""

import functools
import logging

from twell.runtime import env

logger = logging.getLogger("twell")


def configure() -> None:
    """Log to stderr from the level of ``TWELL_LOG``; without it the application decides."""
    level = env.log_level()
    if level is not None:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False


@functools.cache
def warn_once(message: str) -> None:
    logger.warning(message)


@functools.cache
def info_once(message: str) -> None:
    logger.info(message)
