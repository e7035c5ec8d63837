"""Tests of readers beside writers: what a reader gives while the checkpoint that it reads appears, changes or goes."""
