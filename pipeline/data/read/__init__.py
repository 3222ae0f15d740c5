"""Input files of all supported formats -> documents, and records of unreadable input."""
