"""Quantized exports: integer weights, their formats, and perplexity before and after."""
