"""The models and layouts that tools/numerics and tools/parity compare."""
