"""Commits: claim a location, alone or in sessions, and replace the claim by a committed checkpoint."""
