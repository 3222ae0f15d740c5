"""The group certify: whether a job needs a certificate."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.knobs import knob


@dataclass(frozen=True)
class CertificateConfig:
    """Certificate of a pretraining job (stage=certify)."""

    required: bool = knob(
        False, "pretrain and submit refuse to start without a certificate of the same configuration, layout, code version and data"
    )
    certificate: str | None = knob(None, "file of the certificate; default: run_dir/certificate.json")
