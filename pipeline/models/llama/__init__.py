"""Llama (Touvron et al. 2023, Grattafiori et al. 2024)."""
