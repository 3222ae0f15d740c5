"""Estimates of the FLOPs and memory of a run before it starts."""
