"""GPT-2 and GPT-3 (Radford et al. 2019, Brown et al. 2020)."""
