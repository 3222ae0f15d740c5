"""SmolLM3 (Hugging Face 2025)."""
