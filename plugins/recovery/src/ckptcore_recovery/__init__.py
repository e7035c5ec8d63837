"""Recovery in seconds: from steps in the memory of several hosts, or from processes that hold replicas.

peers       `PeerMemory`: saves steps to the memory of the hosts of a job, with copies on other hosts
replicas    `recover`: processes that lost their state get it from others of the running job
watchdog    a monitor that finds stalled processes, and logs of how a job spent its time
plugin      the hooks
"""
