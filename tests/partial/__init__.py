"""Tests of partial saves: checkpoints that are filled in several sessions."""
