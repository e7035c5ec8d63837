"""Orbax checkpoints: metadata files, the three layouts that write them, and AXLearn checkpoints.

This package may import `zarr` and `ocdbt`; neither imports it.
"""
