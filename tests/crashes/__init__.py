"""Checkpoints after a killed save, a power loss, a full disk or a concurrent save."""
