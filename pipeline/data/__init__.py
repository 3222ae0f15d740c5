"""Documents -> text shards -> token shards -> batches. No module imports torch; the data loader depends on numpy only."""
