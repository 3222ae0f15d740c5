"""Mistral (Jiang et al. 2023)."""
