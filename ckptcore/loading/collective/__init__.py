"""Collective loads of all processes of a job: each process reads for itself, or one reads and sends to others."""
