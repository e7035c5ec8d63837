"""Loads: open a checkpoint, match and plan, read, and build, alone or together with the processes of a job."""
