"""Inspection: what a checkpoint contains, what it lacks, and whether its bytes are sound. Loads nothing."""
