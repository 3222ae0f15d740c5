"""Qwen3-MoE (Qwen Team 2025)."""
