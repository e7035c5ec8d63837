"""What the object stores of ckptcore share. No plugin by itself: ckptcore-s3 and ckptcore-gcs are built on it.

::

    storage         a directory of a bucket as a ckptcore storage
    writer          objects in pieces, uploaded in parts
    buckets         the requests of this process to one bucket
    open_buckets    those that a process used last
    part_sizes      where each part of an upload begins
    uploads         uploads in parts
    listing         lists of keys
    plain_requests  HTTP for what obstore has no call
    retrying        retries, with backoff and jitter
    limits          the adaptive limit of requests at once
    runtimes        the process that obstore runs in
    options         the options of a storage, checked
    failures        what a service answered, told apart
    translating     the errors that users see
    services        what a cloud tells the rest
"""
