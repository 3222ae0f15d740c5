"""Tännschen: pretraining of transformers as batch jobs on a Slurm cluster, from raw text to a Hugging Face checkpoint."""
