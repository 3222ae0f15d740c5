"""One engine, one loop: optimizer, gradient sums, metrics."""
