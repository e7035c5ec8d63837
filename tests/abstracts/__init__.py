"""Abstract trees: of values that are there, and of what is stored."""
