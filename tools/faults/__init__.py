"""Faults at exact moments of training jobs: the driver, the faults and the verdicts of tools/chaos and tools/chaos_checkpoint."""
