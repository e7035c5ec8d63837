"""Checkpoints in Amazon S3 and in everything that speaks its protocol: locations such as ``s3://bucket/runs/step_1``.

Nothing here has to be imported: ckptcore finds `ckptcore_s3.plugin` by its entry point. Options are those of
``Context(storage={"s3": {...}})``; `ckptcore_s3.settings` lists them.
"""
