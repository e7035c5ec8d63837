"""Saves and loads on object stores with failing networks and services."""
