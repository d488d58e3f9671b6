"""Building blocks for sm_90a that kernels share."""
