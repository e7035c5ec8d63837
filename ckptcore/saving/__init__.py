"""Saves: requested, planned, captured, written and committed."""
