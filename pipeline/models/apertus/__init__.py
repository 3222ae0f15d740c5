"""Apertus (Swiss AI Initiative 2025)."""
