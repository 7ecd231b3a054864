"""Traces, as a collector receives them from a trainer, a worker and a dispatcher."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from forebay import service
from forebay.journal.codec import decode
from forebay.storage import open_storage

from .. import forks
from ..cluster import WorkerProcess
from ..standbys import wait_until
from ..stock import DispatcherProcess

TRAINER = """
import sys
from forebay import service
with service.read(*sys.argv[1:], processing_mode="distributed_epoch") as elements:
    print(sum(1 for _ in elements), "opentelemetry" in sys.modules)
"""

Spans = dict[bytes, tuple[str, Span]]
"""By their ids: the service that exported each, and the span."""


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, Spans]]:
    """Its URL, and what it has received."""
    received: Spans = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            for of in ExportTraceServiceRequest.FromString(data).resource_spans:
                (name,) = (a.value.string_value for a in of.resource.attributes
                           if a.key == "service.name")  # fmt: skip
                received.update((s.span_id, (name, s)) for x in of.scope_spans for s in x.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def number(span: Span, name: str) -> int:
    return next(a.value.int_value for a in span.attributes if a.key == f"forebay.{name}")


def test_a_trace_leads_from_the_trainer_to_the_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        url, received = stack.enter_context(collector())
        asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50",
                 "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}  # fmt: skip
        for name, value in asked.items():
            monkeypatch.setenv(name, value)
        dispatcher = stack.enter_context(DispatcherProcess(tmp_path / "j"))
        worker = stack.enter_context(WorkerProcess(dispatcher.address))
        for name in asked:
            monkeypatch.delenv(name)
        dataset_id = service.register_dataset(
            dispatcher.target, lambda n: [n, n + 1], splits=range(1000)
        )

        def read(environment: dict[str, str]) -> tuple[str, str]:
            arguments = ["-c", TRAINER, dispatcher.target, dataset_id]
            done = forks.run(arguments, environment=environment)
            return done.stdout.strip(), done.stderr

        assert read({})[0] == "2000 False"
        exporters = "OTEL_TRACES_EXPORTER"  # a list, as in the spec
        shown, _ = read({**asked, exporters: "otlp, console"})
        assert "2000 True" in shown and '"name": "forebay.next"' in shown
        wrong = {"OTEL_PYTHON_TRACER_PROVIDER": "nope", exporters: "otlp, consol"}
        shown, warned = read({**asked, **wrong})  # it is not traced, and reads
        assert shown.startswith("2000 ")
        assert re.search(r"exporter consol cannot be used .*is none of console, otlp", warned)

        def chain(span: Span) -> Iterator[tuple[str, str]]:
            own, name = received[span.span_id][0], span.name
            yield own, name
            if span.parent_span_id:
                yield from chain(received[span.parent_span_id][1])

        wanted = [
            ("forebay-dispatcher", "forebay.append"), ("forebay-dispatcher", "forebay.LeaseSplits"),
            ("forebay-worker", "forebay.make"), ("forebay-trainer", "forebay.next"),
        ]  # fmt: skip

        def whole() -> list[Span]:
            with contextlib.suppress(KeyError):  # a parent is still to come
                return [s for _, s in [*received.values()] if [*chain(s)] == wanted]
            return []

        wait_until(lambda: bool(whole()))
        append = whole()[0]
        lease = received[append.parent_span_id][1]
        make = received[lease.parent_span_id][1]
        waits = {s.trace_id: s for _, s in received.values() if s.name == "forebay.next"}
        # One consumer is traced: the one that was asked to be.
        assert {s.trace_id for _, s in received.values()} <= waits.keys()
        assert len({number(span, "consumer") for span in waits.values()}) == 1
        assert number(append, "sequence") == number(lease, "sequence")
        assert number(lease, "task") == number(make, "task")
        assert worker.address in str(lease.attributes)
        dispatcher.stop()
        (record, *_) = open_storage(str(tmp_path / "j")).read(number(append, "sequence") - 1)
        leased = decode(record.sequence, record.data).splits_leased
        assert (leased.task_id, leased.count) == (number(lease, "task"), number(lease, "splits"))
