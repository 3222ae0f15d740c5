"""Faults at exact moments of a training job, for tools/chaos_checkpoint."""
