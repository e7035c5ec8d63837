"""Incremental saves: checkpoints that several programs fill, and checkpoints that refer to others.

partial_checkpoint  a checkpoint that sessions fill: `ckptcore.partial`
sessions            the save strategy of a session
session_tables      what the sessions wrote, and the union of all of them
finalizing          what the sessions wrote becomes one committed checkpoint
updates             the save strategy of an update: `ckptcore.Update`
overlays            the tree of an update over the tree of its base
"""
