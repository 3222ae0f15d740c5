"""Checkpoints: saving beside training, loading into any layout, adapters, inspection."""
