"""GPT-1 (Radford et al. 2018)."""
