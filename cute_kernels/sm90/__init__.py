"""Kernels for sm_90a alone, and what they share."""
