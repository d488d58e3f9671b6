"""CuTe DSL kernels for sm_90a and their compile-time specs.

Never imports torch or twell; only the kernel modules and ``compile`` import cutlass, so ``specs``, ``geometry``,
``feasible`` and ``catalog`` are available everywhere. Imports are relative because the package is installed as
``twell.cute_kernels``.
"""
