"""Replacement for `orbax.checkpoint.v1` that saves and loads with ckptcore."""
