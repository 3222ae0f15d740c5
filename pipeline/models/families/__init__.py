"""A model family a file: its configuration, its model, its Hugging Face classes, and FAMILY, which has all of them."""
