"""Loads of one tree or of several checkpointables, by one process or by all processes of a job."""
