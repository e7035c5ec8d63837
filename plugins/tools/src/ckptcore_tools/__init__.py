"""Tools for checkpoints. Install them with ``pip install 'ckptcore[tools]'``.

- `ckptcore_tools.copies`: `ckptcore.copy` and `ckptcore.copy_steps`
- `ckptcore_tools.dry_run`: `ckptcore.plan`
- `ckptcore_tools.exports`: `ckptcore.Export`, `WithExports`, `StepExport` and `StepExports`
- `ckptcore_tools.cli`: the command ``ckptcore``
- `ckptcore_tools.opentelemetry`, `ckptcore_tools.step_statistics`: observers that export events to other software
- `ckptcore_tools.policy_text`: preservation policies as text
- `ckptcore_tools.timelines`: events as text
"""
