"""Policies that decide when to save and which steps to keep."""
