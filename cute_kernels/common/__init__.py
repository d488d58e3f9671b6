"""Building blocks of kernels for every GPU since sm_80."""
