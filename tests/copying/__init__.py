"""Copies of checkpoints."""
