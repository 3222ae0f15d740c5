"""The implementations, data and reports of tools/bench_train and tools/bench_data."""
