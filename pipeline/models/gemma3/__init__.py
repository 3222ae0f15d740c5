"""Gemma 3 (Gemma Team 2025)."""
