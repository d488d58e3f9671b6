"""The emulator: compiled kernels on a CPU, against the operators there."""
