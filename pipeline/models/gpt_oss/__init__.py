"""gpt-oss (OpenAI 2025)."""
