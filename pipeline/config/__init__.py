"""The configuration as typed dataclasses, and its validation. No module of this package imports torch."""
