"""Moved to pipeline/artifact.py, where data/ may import it too; this name goes away."""

from pipeline.artifact import MANIFEST as MANIFEST
from pipeline.artifact import Manifest as Manifest
from pipeline.artifact import entry as entry
from pipeline.artifact import finished as finished
from pipeline.artifact import read as read
from pipeline.artifact import verify_files as verify_files
from pipeline.artifact import write as write
