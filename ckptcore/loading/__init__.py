"""Loads: open a checkpoint, match and plan, read, and build, in one process or collectively in a job."""
