"""Loads that the processes of a job make together: each reads for itself, or one reads and sends to others."""
