"""One rank of a planned job, run on its CUDA path on a machine without a GPU: what it allocates, launches, waits for and sends."""
