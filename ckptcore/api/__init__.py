"""The public functions of `ckptcore`: each module is imported when one of its functions is first used.

- `saves`: save a tree, or several objects in one checkpoint
- `loads`: load a tree, as a new value or into a target, or several objects
- `descriptions`: open a checkpoint to read slices, and describe a checkpoint or a value
- `upkeep`: verify and delete
"""
