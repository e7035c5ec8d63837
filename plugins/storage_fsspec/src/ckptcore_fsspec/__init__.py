"""The fsspec plugin: storages for URLs that no other plugin opens, or with the prefix ``fsspec+``.

Importing it does not import fsspec.

::

    plugin         the hook
    opening        opens a storage from a URL and options
    file_systems   cache of fsspec file systems in this process
    storage        objects below a path of a file system, also read-only
    write_methods  writing of objects, and sorting of pieces that arrive out of order
    web            http:// and https://
    failures       conversion of errors
"""

__all__: list[str] = []
