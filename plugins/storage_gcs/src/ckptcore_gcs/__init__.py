"""Store checkpoints in Google Cloud Storage, at locations such as ``gs://bucket/runs/step_1``.

Programs need no import: ckptcore finds `ckptcore_gcs.plugin` by its entry point. Set options with
``Context(storage={"gs": {...}})``; `ckptcore_gcs.settings` lists them.
"""
