"""Loads: match and plan, read, and build, in one process or together in a job; of one tree or of several objects."""
