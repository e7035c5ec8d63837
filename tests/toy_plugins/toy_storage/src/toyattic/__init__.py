"""A toy storage for ckptcore: objects in an SQLite database, under ``toy://<path of database>.sqlite/<directory>``."""
