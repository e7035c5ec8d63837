"""Checkpoints of several checkpointables."""
