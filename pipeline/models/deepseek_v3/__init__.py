"""DeepSeek-V3 (DeepSeek-AI 2024)."""
