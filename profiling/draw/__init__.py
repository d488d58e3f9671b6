"""The charts of `profiling/charts/`."""
