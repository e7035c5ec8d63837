"""Reads checkpoints of other software, without that software."""
