"""The model families, one folder each: configuration, model, parallel plan, Hugging Face mapping. See README.md."""
