"""Tännschen: raw text in, a Hugging Face checkpoint out, as batch jobs on a Slurm cluster."""
