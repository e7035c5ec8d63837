"""Loads: what users ask of them, matched with what is stored, read and built, by one process or by those of a job."""
