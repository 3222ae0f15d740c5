"""ModernBERT (Warner et al. 2024)."""
