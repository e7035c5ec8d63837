"""Checkpoints in Google Cloud Storage: locations such as ``gs://bucket/runs/step_1``.

Nothing here has to be imported: ckptcore finds `ckptcore_gcs.plugin` by its entry point. Options are those of
``Context(storage={"gs": {...}})``; `ckptcore_gcs.settings` lists them.
"""
