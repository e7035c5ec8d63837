"""The functions that users call, by what they do; `ckptcore` has them all, and imports a module of these with its first use.

- `saves`: trees, and several objects in one checkpoint
- `sessions`: a checkpoint that is filled in several sessions
- `plans`: what a save would do
- `loads`: values, whole or what is asked for
- `parts`: parts of arrays
- `descriptions`: what there is, without its arrays
- `copies`: a checkpoint again, elsewhere or in another layout
- `upkeep`: verifying and deleting
"""
