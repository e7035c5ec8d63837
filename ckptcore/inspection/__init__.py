"""Inspection: describes checkpoints, finds missing files, and verifies bytes. Loads nothing."""
