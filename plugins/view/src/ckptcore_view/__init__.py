"""A viewer for checkpoints and training runs. Install it with ``pip install 'ckptcore[view]'``.

``ckptcore view LOCATION`` serves a page for the browser, and ``--out report.html`` writes it to a file. Notebooks show
open checkpoints, metadata, arrays and differences as HTML.

::

    viewed     the subject: a run, a folder of runs, a checkpoint, or one of several checkpointables
    documents  the content of the page, as JSON
    shardings  the boxes of an array on devices and processes
    server     serves the page and the documents on 127.0.0.1
    report     writes the page and the documents to one file
    notebook   HTML of single objects
    page       the page: HTML, style and scripts
"""
