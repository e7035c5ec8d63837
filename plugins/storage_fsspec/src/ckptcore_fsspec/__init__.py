"""fsspec for ckptcore: storages for the URLs that no other plugin opens. Importing this imports no fsspec.

::

    plugin         the hook
    opening        a URL and options, as a storage
    file_systems   the file systems of fsspec that are open in this process
    storage        the objects below a path of a file system
    places         how a file system is given an object: streamed, spooled, or renamed
    ranges         buffers that are filled from ranges of one object
    writing        pieces in any order, in the order of the bytes
    read_only      a storage that takes nothing
    web            http:// and https://
    requests       what is asked of a web server
    failures       errors of file systems, as those of ckptcore
"""

__all__: list[str] = []
