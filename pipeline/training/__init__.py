"""Training: engines, the training loop, optimizer, gradient reduction and metrics."""
