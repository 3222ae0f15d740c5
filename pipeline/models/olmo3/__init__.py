"""OLMo 3 (Team OLMo 2025)."""
