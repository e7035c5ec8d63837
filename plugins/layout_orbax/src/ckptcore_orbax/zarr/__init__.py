"""Arrays of zarr 2 and 3: their metadata, their chunks as objects or as values of an OCDBT database, and their elements.

This package may import `ocdbt`, and does not import `orbax`.
"""
