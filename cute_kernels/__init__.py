"""CuTe DSL kernels and their compile-time specs.

A kernel is here if every GPU since sm_80 runs it, in ``sm90/`` if only sm_90a does, and in ``sm80/`` if all others do
in place of that one. ``common/`` has what kernels of several folders share.

Never imports torch or twell; only the kernel modules and ``compile`` import cutlass, so ``specs``, ``geometry``,
``feasible`` and ``catalog`` are available everywhere. Imports are relative because the package is installed as
``twell.cute_kernels``.
"""
