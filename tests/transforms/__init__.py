"""Tests of transforms."""
