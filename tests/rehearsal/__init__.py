"""Tests of pipeline/rehearsal."""
