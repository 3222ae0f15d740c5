"""Launching: rank detection, rendering and submission of Slurm jobs, and the Hydra launcher for sweeps."""
