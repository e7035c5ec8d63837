"""Shared code of the plugins ckptcore-s3, ckptcore-gcs and ckptcore-azure. Not a plugin itself.

::

    storage         a directory of a bucket as a ckptcore storage
    writer          objects written in pieces and uploaded in parts
    buckets         operations on the objects of one bucket
    open_buckets    a cache of buckets
    part_sizes      the division of an object into parts
    uploads         uploads in parts
    copied_uploads  uploads under a temporary name, and their copies
    listing         lists of keys
    plain_requests  HTTP requests that obstore lacks
    retrying        retries, with backoff and jitter
    limits          the adaptive limit of concurrent requests
    runtimes        the process that obstore runs in
    options         validation of storage options
    failures        classification of failed requests
    storage_errors  conversion of failures to ckptcore errors
    services        the protocol that each cloud implements
"""
