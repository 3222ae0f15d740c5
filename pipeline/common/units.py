"""Units of metrics and scores, for the axes of charts."""

from __future__ import annotations

_UNITS = {
    "loss": "nats per target",
    "validation_loss": "nats per target",
    "bits_per_byte": "bits per byte of text",
    "perplexity": "perplexity",
    "pseudo_perplexity": "perplexity",
    "aux_loss": "nats",
    "grad_norm": "norm of the gradient",
    "lr": "learning rate",
    "tokens": "tokens",
    "samples": "sequences",
    "tokens_per_second": "tokens/s",
    "seconds": "seconds",
    "data_seconds": "seconds",
    "data_stalls": "batches",
    "skipped": "steps",
    "memory_gb": "GB (10^9 bytes)",
    "mfu": "share of the peak FLOP/s",
    "validation_targets": "targets",
    "loss_scale": "factor",
}


def unit_of(metric: str) -> str:
    """Return the unit of a metric of metrics.jsonl, or of a score of an evaluation; the name of one without a unit."""
    if "rewards_" in metric and not metric.endswith("accuracy"):
        return "nats"
    return _UNITS.get(metric, metric.replace("_", " "))
