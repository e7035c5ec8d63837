"""Opening: finds the root of a checkpoint, or asks the layouts, and returns open checkpoints."""
