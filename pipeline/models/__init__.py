"""The model families, one folder each: configuration, model, parallel plan, Hugging Face adapter. See README.md."""
