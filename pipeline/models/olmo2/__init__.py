"""OLMo 2 (Team OLMo 2025)."""
