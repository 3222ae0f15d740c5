"""Mixtral (Jiang et al. 2024)."""
