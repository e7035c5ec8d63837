"""A toy layout for ckptcore: one file for each box of an array, and an index."""
