"""OPT (Zhang et al. 2022)."""
