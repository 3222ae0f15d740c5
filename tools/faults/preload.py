"""Imports what a rank needs, in the process that ranks are forked from: a start then takes tenths of a second instead of seconds."""

import pkgutil
from importlib import import_module

import torch.distributed.pipelining

import pipeline

__all__ = ["torch"]

for _module in pkgutil.walk_packages(pipeline.__path__, "pipeline."):
    if not _module.name.endswith("__main__"):
        import_module(_module.name)
import_module("pipeline.config.compose").register()
