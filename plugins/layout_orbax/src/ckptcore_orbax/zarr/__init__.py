"""Arrays of zarr 2 and 3: metadata, chunks as objects or as values of an OCDBT database, and elements.

This package may import `ocdbt`; it does not import `orbax`.
"""
