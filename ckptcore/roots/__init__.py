"""Roots: the small objects by which checkpoints exist, what is in them, and what comes into them."""
