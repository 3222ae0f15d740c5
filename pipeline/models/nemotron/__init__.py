"""Nemotron-4 and Minitron (NVIDIA 2024)."""
