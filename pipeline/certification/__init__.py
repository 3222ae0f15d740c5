"""Certification: a small version of a job's configuration, trained on CPU ranks and compared with a plain single-process loop."""
