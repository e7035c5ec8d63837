"""Abstract trees of live values and of stored checkpoints."""
