"""Granite 3 (IBM 2024)."""
