"""Matching: compares the tree that a caller asks for with the stored tree. Reads no arrays."""
