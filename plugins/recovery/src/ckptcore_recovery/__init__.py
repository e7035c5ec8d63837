"""Recovery: steps in the memory of several hosts, from which a restarted job loads in seconds.

peers       `PeerMemory`: saves steps to the memory of the hosts of a job, with copies on other hosts
plugin      the hooks
"""
