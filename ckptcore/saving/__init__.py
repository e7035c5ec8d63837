"""Saves: what users ask of them, planned, captured and made durable, whole, by sessions or over a base."""
