"""Incremental saves: partial checkpoints, which several sessions fill, and updates, which refer to a base.

partial_checkpoint  `ckptcore.partial`: a checkpoint that several sessions fill
sessions            save strategy of a session
session_claims      claims of sessions, one at a time, and of the finalization
session_tables      stored receipts of the sessions, and their union
finalizing          commit of all sessions as one checkpoint
updates             `ckptcore.Update`: save strategy of an update
based_commits       commit of a checkpoint that needs bases: of an update, and of a delta of ckptcore-versions
overlays            the tree of an update on the tree of its base
"""
