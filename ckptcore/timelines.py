"""Timelines: the events of one operation as JSON that a checkpoint stores, and as text that people read."""
