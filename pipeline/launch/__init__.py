"""Slurm: which rank this process is, the text of a job, its submission, and the Hydra launcher of sweeps."""
