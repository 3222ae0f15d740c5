"""Parallelism, applied to plain models from outside. Sole owner of torch's process groups."""
