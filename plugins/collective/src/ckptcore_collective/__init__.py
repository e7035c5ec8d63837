"""Collective loads: one process of a job reads the data that several processes request, and sends it to the others.

shares      the process that reads each requested box, and the order of messages: pure functions
broadcasts  runs such a plan: reads, sends, receives, and builds each leaf once it is complete
shared      `SharedAttempt`: one attempt to load collectively, for `ckptcore.loading.joint.CollectiveRead`
"""
