"""Parallelism, applied to plain PyTorch models. The only package that creates process groups."""
