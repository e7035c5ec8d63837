"""Publishing: a trainer writes versions.

publisher       `Publisher`
version_saves   the save strategy of a version: its base, the copy that becomes the next base, the commit
held_weights    the copy of the newest version, in memory or in a mapped file
selecting       the leaves that a version has
"""
