"""Scores of checkpoints: lm-eval on native weights, and tables and plots over checkpoints."""
