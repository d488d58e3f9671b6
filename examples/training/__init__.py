"""Parts of ``train.py`` and ``relufy.py``: data, model, optimizer, parallel, checkpoint, report."""


class RequestError(ValueError):
    """A request of the command line cannot be served; the message says what was expected and what was got."""
