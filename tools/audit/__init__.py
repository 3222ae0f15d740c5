"""Cases and parts of numerics, parity, reshard_matrix, the audits, ladder and gpu_kernels."""
