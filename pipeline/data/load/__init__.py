"""Token shards -> training samples: numpy only, no torch."""
