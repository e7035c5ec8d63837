"""Open checkpoints, stored arrays and their indexing."""
