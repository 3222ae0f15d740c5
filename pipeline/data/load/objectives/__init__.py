"""What a model is asked to predict: from samples of text to the arrays of a batch."""
