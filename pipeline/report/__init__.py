"""What a person sees of training runs: one reader of run directories, and the table, page and text made of it. Imports no torch."""
