"""The model families, one folder each: configuration, model, tensor-parallel table, Hugging Face mapping. See README.md."""
