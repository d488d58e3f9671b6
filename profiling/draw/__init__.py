"""Charts of ``profiling/charts/``."""
