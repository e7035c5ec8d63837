"""Orbax checkpoints: the files beside the arrays, the three layouts that write them, and AXLearn checkpoints.

This package may import `zarr` and `ocdbt`; neither imports it.
"""
