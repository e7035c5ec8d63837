"""The public functions of `ckptcore`: each module is imported when one of its functions is first used.

- `saves`: save a tree, or several objects in one checkpoint
- `loads`: load a tree, as a new value or into a target, or several objects
- `checkpoints`: open a checkpoint to read slices, describe, verify and delete it, and describe a value
"""
