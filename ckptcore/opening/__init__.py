"""Opening of checkpoints, by their root or by the installed layouts.

- `checkpoint`: open checkpoints, and errors that name their arrays
- `open_checkpoints`: opens checkpoints of ckptcore, and opens them again if they are replaced during a read
- `members`: opens members of composites
- `foreign`: opens checkpoints of other software; `folders` finds checkpoints and runs inside other directories
- `derived`: checkpoints whose arrays are computed from other checkpoints; `bases` combines an update with its bases
- `host_copies`: reads from the copies that a host stores
"""
