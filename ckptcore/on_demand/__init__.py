"""On demand: open checkpoints whose arrays are read when they are indexed or iterated over."""
