"""What two kernels share on sm_90a: argument signatures, packed-value arithmetic and warp-level scans."""
