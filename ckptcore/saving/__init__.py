"""Saves: request, plan, capture, write and commit."""
