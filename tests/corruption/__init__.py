"""Loads and verification of damaged and forged checkpoints."""
