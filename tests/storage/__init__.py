"""Tests of the storages that ship with the core, and of the fakes that stand for them."""
