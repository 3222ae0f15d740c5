"""Deduplication: exact, near, by URL, by paragraph."""
