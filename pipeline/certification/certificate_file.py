"""certificate.json: the certificate with the planned configuration, the small job and the versions that it was made with."""

from __future__ import annotations

import dataclasses
import platform
import socket
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from pipeline.certification.certificate import Certificate
from pipeline.certification.comparison import Difference
from pipeline.common.git_commit import commit
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.launch import certified


def content(config: RunConfig, layout: Layout, overrides: list[str], certificate: Certificate, seconds: float) -> dict[str, Any]:
    """Return the certificate as values of JSON.

    Args:
        config: the planned configuration.
        layout: the planned layout.
        overrides: the command line, with --config-dir.
        certificate: the result.
        seconds: duration of the comparison.
    """
    small = Layout.of(certificate.small.config, certificate.small.world_size)
    return {
        "certified": not certificate.failures,
        "failures": certificate.failures,
        "details": certificate.details,
        "planned": {
            "world_size": layout.world_size,
            "layout": dataclasses.asdict(layout),
            "overrides": overrides,
            "config": dataclasses.asdict(config),
        },
        "small": {
            "world_size": small.world_size,
            "layout": dataclasses.asdict(small),
            "shrunk": [{"key": change.key, "from": change.planned, "to": change.small} for change in certificate.small.changes],
            "data": "random tokens; initial weights of the run with noise added to every element",
        },
        "comparisons": [
            {
                "precision": comparison.dtype,
                "method": comparison.method,
                "tolerances": comparison.tolerances,
                "differences": _values(comparison.found),
                "rounding": _values(comparison.rounding),
            }
            for comparison in certificate.comparisons
        ],
        "data": {} if any(part.part == "data" and part.not_covered for part in certificate.parts) else certified.data_of(config),
        "parts": {
            part.part: {"covered": part.covered, "not_covered": part.not_covered, "failures": part.failures} for part in certificate.parts
        },
        "versions": {name: version(name) for name in ("torch", "deepspeed", "numpy")} | {"python": platform.python_version()},
        "commit": commit(),
        "host": socket.gethostname(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
    }


def _values(differences: dict[str, Difference]) -> dict[str, dict[str, Any]]:
    """Return differences as values of JSON, which has no infinity."""
    return {name: {"value": d.value if d.value < float("inf") else "not finite", "where": d.where} for name, d in differences.items()}
