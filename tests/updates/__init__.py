"""Tests of updated copies: checkpoints that refer to others for what did not change."""
