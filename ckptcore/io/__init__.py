"""The engine that moves bytes between arrays and storage. It knows boxes and blocks, but no layout and no framework.

- `threads`, `background`: threads for requests, and for saves and loads in the background
- `requests`: how many requests suit a storage, how large, and which ranges together
- `memory`, `snapshot`: memory to read into, staging memory of saves, and the arrays of one save
- `elements`: elements of arrays as bytes, and boxes as runs
- `checksums`: checksums of blocks, and checksums inside objects
- `segments`, `object_writes`: objects as they are written
- `destinations`, `read_tasks`, `reader`: objects as they are read
- `block_cache`: open objects for many small reads
- `chunk_reads`: boxes of arrays, read through the chunk index of a layout
"""
