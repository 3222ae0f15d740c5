"""What every package may use: messages, keys, files, locks, progress, ranks, communicators and HTML pages."""
