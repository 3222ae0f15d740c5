"""RoBERTa (Liu et al. 2019, https://arxiv.org/abs/1907.11692): BERT's encoder with RoBERTa's configuration."""

from __future__ import annotations

from pipeline.models.bert.model import build, initial_std

__all__ = ["build", "initial_std"]
