"""Cleaned documents -> shuffled text shards and a report."""
