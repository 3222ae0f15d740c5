"""RoBERTa (Liu et al. 2019, https://arxiv.org/abs/1907.11692): BERT's encoder with RoBERTa's configuration.

XLM-R (Conneau et al. 2020, https://arxiv.org/abs/1911.02116) and CamemBERT (Martin et al. 2020, https://arxiv.org/abs/1911.03894) are the
same model with other vocabularies and data.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.models.bert.model import BERT
from pipeline.models.roberta.config import RobertaConfig
from pipeline.models.roberta.huggingface import MAPPINGS

#: The next-sentence head of BERT's tensor-parallel table is RoBERTa's head of sequence classification.
ROBERTA = replace(BERT, config=RobertaConfig, huggingface=MAPPINGS)
