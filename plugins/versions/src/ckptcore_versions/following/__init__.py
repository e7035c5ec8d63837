"""Following: an engine keeps the newest version in a cache on a local disk.

follower        `follow`
cache           the directory of the versions that a follower keeps
local_version   a version in the cache; `local_files`: its mapped files
preparing       preparation of a version in the cache, and what changed in it
version         what a follower yields; `installing`: writes of a version into weights
"""
