"""What a run will cost, before it is started."""
