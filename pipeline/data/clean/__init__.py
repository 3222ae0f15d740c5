"""Cleaning: an ordered list of steps, each of which says of some documents of a batch that they change or go, and why."""
