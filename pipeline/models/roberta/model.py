"""RoBERTa (Liu et al. 2019, https://arxiv.org/abs/1907.11692): BERT's encoder with RoBERTa's configuration.

XLM-R (Conneau et al. 2020, https://arxiv.org/abs/1911.02116) and CamemBERT (Martin et al. 2020, https://arxiv.org/abs/1911.03894) are the
same model with other vocabularies and data.
"""

from __future__ import annotations

from pipeline.models.bert.model import build, initial_std

__all__ = ["build", "initial_std"]
