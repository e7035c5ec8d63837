"""Watchdog and goodput: finds what stalls, and how a job spends its time over all its restarts.

run_log         the format of run logs, and `read_run_log`
run_log_writer  `RunLog`: writes the log of one incarnation
time_account    divides the time of an incarnation between its activities
"""
