"""Every knob of a run as a typed field, and the checks across them. Nothing here imports torch."""
