"""T5 and T5 1.1 (Raffel et al. 2020)."""
