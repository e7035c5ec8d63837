"""Policies: when to save, and which steps to keep."""
