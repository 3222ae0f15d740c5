"""Checkpoints: save, load into any layout, and the formats they convert to."""
