"""Tests of concurrent readers and writers: results of reads while the checkpoint is committed, replaced or deleted."""
