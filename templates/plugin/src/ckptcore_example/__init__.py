"""Arrays with a unit, and their plugin for ckptcore. Imports nothing: `quantities` has the type."""
