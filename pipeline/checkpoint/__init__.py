"""Checkpoints: saving, loading into any layout, conversion to and from Hugging Face."""
