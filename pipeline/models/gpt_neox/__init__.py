"""GPT-NeoX and Pythia (EleutherAI 2022 and 2023)."""
