"""Parts of the scripts: data, model, optimizer, parallel, checkpoint, report; of ``sae.py`` activations."""


class RequestError(ValueError):
    """A request of the command line cannot be served; the message says what was expected and what was got."""
