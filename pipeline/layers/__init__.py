"""The mathematics, once: plain PyTorch on full tensors."""
