"""Store checkpoints in Amazon S3 and compatible services, at locations such as ``s3://bucket/runs/step_1``.

Programs need no import: ckptcore finds `ckptcore_s3.plugin` by its entry point. Set options with
``Context(storage={"s3": {...}})``; `ckptcore_s3.settings` lists them.
"""
