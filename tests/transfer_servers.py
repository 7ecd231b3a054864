"""Where the workers of tests that have none could be read from."""

from __future__ import annotations

from forebay.journal.proto import events_pb2 as ev

SERVERS = [ev.TransferServer(protocol="tcp", address="127.0.0.1:1")]
