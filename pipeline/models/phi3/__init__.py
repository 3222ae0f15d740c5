"""Phi-3 and Phi-4 (Microsoft 2024)."""
