"""The engine that moves bytes between arrays and storages. It knows boxes and blocks, but no layout and no framework.

- `threads`: threads for requests, copies and background work; the number and the size of requests
- `background`: asynchronous saves and loads, and their handles
- `memory`, `snapshot`: buffers of loads, staging memory of saves, and the arrays of one save
- `elements`: elements of arrays as bytes, and boxes as runs
- `checksums`: checksums of blocks, and checksums inside objects
- `segments`, `object_writes`: writes of objects
- `read_tasks`, `reader`: reads of objects
- `block_cache`: open objects for many small reads
- `chunk_reads`: reads of boxes of arrays through the chunk index of a layout
"""
