"""The layout `deltas`: chunks of arrays, each in its smallest encoding against the version before.

layout           writes versions and locates their chunks
chunks           the boxes of chunks, and the table of their places
encoding         the encodings of a chunk; `checksums`: a checksum of its new elements
patched_arrays   arrays that a read computes from a base and the changes of a chain
"""
