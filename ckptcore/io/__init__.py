"""The engine that moves bytes between arrays and storage; it knows boxes and blocks, no layout and no framework.

- `threads`: the threads that do it, and what a forked child begins anew
- `pages`, `memory`: memory to read into, and staging memory that one save leaves to the next
- `elements`: elements of arrays as bytes
- `sizes`: how many bytes it moves at a time
- `requests`: how many requests suit a storage
- `checksums`: a checksum per block
- `errands`: one thing to do for each of many
- `segments`, `object_writes`, `recorder`: objects as they are written
- `chunks`, `destinations`, `read_tasks`, `near_ranges`, `sources`, `reader`: objects as they are read
- `chunk_reads`: boxes of arrays, read through the chunk index of a layout
- `transfers`: objects as they are copied from one storage to another
"""
