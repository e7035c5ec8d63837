"""Tests of the built-in storages, and of the fakes for others."""
