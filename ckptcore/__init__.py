"""Checkpointing for machine learning that belongs to no framework."""
