"""Faults of Slurm jobs on the dev cluster, for tools/chaos."""
