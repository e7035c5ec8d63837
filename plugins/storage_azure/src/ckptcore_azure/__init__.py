"""Store checkpoints in Azure Blob Storage, at locations such as ``az://container/runs/step_1``.

Programs need no import: ckptcore finds `ckptcore_azure.plugin` by its entry point. Set options with
``Context(storage={"az": {...}})``; `ckptcore_azure.settings` lists them.
"""
