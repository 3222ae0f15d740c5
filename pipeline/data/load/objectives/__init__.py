"""Training objectives: what a model is trained to predict, from samples of text to the arrays of a batch."""
