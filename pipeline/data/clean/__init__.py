"""Cleaning: an ordered list of steps. Each step changes or drops documents of a batch, with a reason for each."""
