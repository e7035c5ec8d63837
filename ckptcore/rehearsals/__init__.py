"""Rehearsals: saves that go through planning, layouts and commit without elements and without a storage.

::

    counting    a storage that keeps names and sizes, and counts what it is asked
    sizes       what a layout hands its objects to
    emptiness   a snapshot in which there is nothing
    leaves      handlers of leaves that describe and are asked for nothing else
    imagined    the processes of a job that does not run
    writes      what one process writes
    commits     what the leader adds
    telling     what processes tell each other of it
    jobs        all processes together
"""
