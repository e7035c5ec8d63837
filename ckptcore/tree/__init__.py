"""Trees: take values apart into skeletons and leaves, merge trees, and rebuild values."""
