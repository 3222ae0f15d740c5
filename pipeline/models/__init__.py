"""The model families, each a folder: config, model, parallel plan, Hugging Face adapter."""
