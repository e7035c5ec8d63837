"""Recovery from a healthy replica: processes that lost their state get it from others of the running job.

recovery    `recover`
agreeing    agreement of all processes: the tree, the plan, the digests
job_state   reports about states, and the state of the job as a checkpoint that can be loaded
transfers   the plan: parcels of elements, and who sends them
listening   accepts connections of processes that know a token
sending     the side of a process that has its state
fetching    the side of a process that lost it
torchft     a `CheckpointTransport` of torchft
"""

from ckptcore_recovery.replicas.job_state import NoReplicaError, ReplicasDifferError
from ckptcore_recovery.replicas.recovery import RecoveryReport, recover

__all__ = ["NoReplicaError", "RecoveryReport", "ReplicasDifferError", "recover"]
