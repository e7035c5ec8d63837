"""Watchdog and goodput: finds what stalls, and how a job spends its time over all its restarts.

watchdog        `Watchdog`: tells a monitor what the training process does
monitor         the monitor, a process of its own
detection       finds steps and operations that exceed their bounds; bounds are given or learnt
policy          what to do about a stall
reports         what a monitor writes about a stall; `read_incidents` reads it
stacks          the stacks of a process; utilisation its processors and GPUs
run_log         the format of run logs, and `read_run_log`
run_log_writer  `RunLog`: writes the log of one incarnation
time_account    divides the time of an incarnation between its activities
goodput         the parts of the time of a run
save_interval   the save interval that loses least
goodput_text    both as text, for the command and for the page of a run
command         `ckptcore goodput` and `ckptcore stalls`
"""

from ckptcore_recovery.watchdog.bounds import DEFAULT_BOUNDS, Learnt
from ckptcore_recovery.watchdog.goodput import Goodput, IncarnationTime, goodput_of
from ckptcore_recovery.watchdog.policy import AskForSave, Command, EndJob, Log, Webhook
from ckptcore_recovery.watchdog.reports import Incident, StallReport, read_incidents
from ckptcore_recovery.watchdog.run_log import Incarnation, Note, read_run_log
from ckptcore_recovery.watchdog.run_log_writer import RunLog
from ckptcore_recovery.watchdog.save_interval import SaveInterval, save_interval_of
from ckptcore_recovery.watchdog.time_account import Period
from ckptcore_recovery.watchdog.watchdog import Watchdog

__all__ = [
    "DEFAULT_BOUNDS",
    "AskForSave",
    "Command",
    "EndJob",
    "Goodput",
    "Incarnation",
    "IncarnationTime",
    "Incident",
    "Learnt",
    "Log",
    "Note",
    "Period",
    "RunLog",
    "SaveInterval",
    "StallReport",
    "Watchdog",
    "Webhook",
    "goodput_of",
    "read_incidents",
    "read_run_log",
    "save_interval_of",
]
