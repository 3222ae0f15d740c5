"""BLOOM (Le Scao et al. 2022)."""
