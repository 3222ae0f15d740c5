"""Qwen3-Next (Qwen Team 2025)."""
