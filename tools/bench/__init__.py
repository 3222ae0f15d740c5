"""The harness, implementations and data of the benchmarks."""
