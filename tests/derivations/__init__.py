"""Tests of derivations."""
