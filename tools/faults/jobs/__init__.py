"""Faults, layouts and jobs, on the dev cluster or on this machine."""
