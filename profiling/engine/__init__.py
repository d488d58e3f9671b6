"""Measures vLLM's own engine on a GPU, without twell and with it: `python -m profiling.engine --help`."""
