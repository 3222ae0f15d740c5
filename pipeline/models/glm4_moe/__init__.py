"""GLM-4.5 (GLM-4.5 Team 2025)."""
