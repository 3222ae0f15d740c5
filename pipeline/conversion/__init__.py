"""Checkpoints made of others: formats of other tools, and merges."""
