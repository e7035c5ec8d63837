"""Commits: claiming a place, alone or in sessions, and turning the claim into a committed checkpoint."""
