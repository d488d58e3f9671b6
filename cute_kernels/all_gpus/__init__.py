"""Kernels that every GPU runs."""
