"""Checkpoints after a killed save, a power failure, a full disk or a concurrent save."""
