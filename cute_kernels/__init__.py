"""Kernels in CuTe DSL for sm_90a: what is known at compile time.

Never imports torch or twell; only the kernel modules and ``compile`` import cutlass, so ``specs``, ``geometry``,
``feasible`` and ``catalog`` are available everywhere. Imports are relative because the package is installed as
``twell.cute_kernels``.
"""
