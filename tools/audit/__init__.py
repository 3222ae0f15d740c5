"""The test cases of tools/numerics and tools/parity."""
