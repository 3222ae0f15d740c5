"""Documents -> text shards -> token shards -> batches. The loader needs numpy only; nothing here loads torch."""
