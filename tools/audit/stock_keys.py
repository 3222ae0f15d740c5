"""Writes pipeline/models/stock_keys.json: the keys of config.json that the Hugging Face class of every adapter reads.

Run it after a family is added, or when the pinned release of transformers changes: python -m tools.audit.stock_keys
"""

from __future__ import annotations

import json
from typing import Any

from pipeline.models import registry
from pipeline.models.families import FAMILIES
from pipeline.models.stock_keys import TABLE, installed_source


def table() -> dict[str, Any]:
    """Return the content of the file, for the installed transformers."""
    source = installed_source()
    assert source is not None, "transformers is not installed"
    found = {}
    for adapter in (adapter for family in FAMILIES for adapter in registry.adapters(family)):
        keys = source.keys(adapter.architecture, adapter.model_type)
        assert keys is not None, f"transformers {source.release} has no {adapter.architecture} with model_type={adapter.model_type}"
        found[adapter.architecture] = keys
    common = frozenset.intersection(*(keys.reads for keys in found.values()))
    return {
        "transformers": source.release,
        "common": sorted(common),
        "defaulted": sorted(frozenset().union(*(keys.defaulted for keys in found.values()))),
        "classes": {name: {"reads": sorted(keys.reads - common), "aliases": keys.aliases} for name, keys in sorted(found.items())},
    }


def main() -> None:
    """Write the file, with one line for each class."""
    content = table()
    classes = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in content.pop("classes").items())
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + ',\n  "classes": {\n' + classes + "\n  }\n}\n", encoding="utf-8")
    print(f"wrote {TABLE}")


if __name__ == "__main__":
    main()
