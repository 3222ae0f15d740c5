"""Documents -> text shards -> token shards -> batches. Nothing here loads torch; what trains needs numpy only."""
