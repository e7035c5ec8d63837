"""Watchdog and goodput: finds what stalls, and how a job spends its time over all its restarts.

run_log         the format of run logs, and `read_run_log`
run_log_writer  `RunLog`: writes the log of one incarnation
time_account    divides the time of an incarnation between its activities
goodput         the parts of the time of a run
save_interval   the save interval that loses least
goodput_text    both as text, for the command and for the page of a run
command         `ckptcore goodput`
"""

from ckptcore_recovery.watchdog.goodput import Goodput, IncarnationTime, goodput_of
from ckptcore_recovery.watchdog.run_log import Incarnation, Note, read_run_log
from ckptcore_recovery.watchdog.run_log_writer import RunLog
from ckptcore_recovery.watchdog.save_interval import SaveInterval, save_interval_of
from ckptcore_recovery.watchdog.time_account import Period

__all__ = [
    "Goodput",
    "Incarnation",
    "IncarnationTime",
    "Note",
    "Period",
    "RunLog",
    "SaveInterval",
    "goodput_of",
    "read_run_log",
    "save_interval_of",
]
