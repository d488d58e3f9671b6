"""Kernels for every GPU since sm_80, on cp.async, ldmatrix and mma.sync, and what they share."""
