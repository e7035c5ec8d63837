"""Steps: the checkpoints of a run in a directory: found, restored, copied, given up."""
