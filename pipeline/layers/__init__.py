"""Layers of the models: plain PyTorch on full tensors."""
