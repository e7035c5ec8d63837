"""The strict GCS server as a program: ``python -m ckptcore_gcs_server --port 4443 --bucket name``."""

from __future__ import annotations

import argparse

from ckptcore_gcs_server.server import StrictGcs

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A strict GCS server on 127.0.0.1, in memory.")
    parser.add_argument("--port", type=int, default=0, help="port; 0 for a free one")
    parser.add_argument("--bucket", action="append", default=[], help="a bucket to create; repeatable")
    parser.add_argument("--token", help="the token that requests must have")
    arguments = parser.parse_args()
    server = StrictGcs(arguments.bucket, port=arguments.port, token=arguments.token)
    print(server.url, flush=True)
    server.serve_forever()
