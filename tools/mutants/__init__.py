"""The parts of tools/certify_mutants: mutations of the pipeline's source, the effect of each, and what certify says of them."""
