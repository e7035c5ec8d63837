"""Saves and loads on object stores as networks and services are on a bad day."""
