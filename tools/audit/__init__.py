"""Cases and parts of numerics, parity, reshard_matrix, the audits, ladder, coordinate_check and gpu_kernels."""
