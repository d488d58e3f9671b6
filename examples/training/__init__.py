"""What ``train.py`` is made of: data, model, parallel, checkpoint."""


class RequestError(ValueError):
    """What the command line asks for cannot be met; the message says what was got and what expected."""
