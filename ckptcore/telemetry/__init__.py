"""Observers that hand events on: to OpenTelemetry, and as the step statistics that goodput tools read.

Importing this imports neither; what an observer needs is imported when it is made.
"""
