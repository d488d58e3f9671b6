"""The fuzzer: random layers against float64."""
