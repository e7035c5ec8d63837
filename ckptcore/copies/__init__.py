"""Copies: a checkpoint again, elsewhere, in another layout or for other software."""
