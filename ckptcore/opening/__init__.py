"""Opening: finds the root of a checkpoint, or asks the layouts, and returns open checkpoints.

- `checkpoint`: open checkpoints, and errors that name their arrays
- `open_checkpoints`: opens what ckptcore wrote, again if it is replaced meanwhile; `members` opens parts of composites
- `foreign`: opens what other software wrote; `folders` finds out what a directory has that is no checkpoint
- `derived`: checkpoints whose arrays are computed from those of others; `bases` makes such checkpoints of updates
- `host_copies`: reads from the copies on a host
"""
