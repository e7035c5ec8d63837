"""Tests of the built-in storages, and of fakes of other storages."""
