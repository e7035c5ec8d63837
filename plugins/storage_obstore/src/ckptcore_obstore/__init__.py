"""Shared code of the plugins ckptcore-s3, ckptcore-gcs and ckptcore-azure. Not a plugin itself.

::

    storage          a directory of a bucket as a ckptcore storage, and a cache of open buckets
    writer           objects written in pieces and uploaded in parts
    buckets          operations on the objects of one bucket
    uploads          lists of keys, uploads in parts, and uploads under a temporary name
    bucket_requests  requests to one bucket with obstore or HTTP, and the errors that users see
    retrying         retries, with backoff and jitter, and the adaptive limit of concurrent requests
    services         the base of each cloud's service, and sources of credentials
    options          validation of storage options
    failures         classification of failed requests
    forks, runtimes  reset of objects in forked children, and the process that obstore runs in
"""
