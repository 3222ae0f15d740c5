"""OLMoE (Muennighoff et al. 2024)."""
