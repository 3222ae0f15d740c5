"""Names and configuration dataclasses of the model families."""

from pipeline.models.registry import CONFIG_CLASSES, from_dict

__all__ = ["CONFIG_CLASSES", "from_dict"]
