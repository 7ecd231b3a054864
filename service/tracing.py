"""Spans of OpenTelemetry, if somebody asks for them (docs/operations.md).

One trace leads from a trainer that waits to the decision without which it would wait longer:

    forebay.next (trainer) ─► forebay.make (worker) ─► forebay.LeaseSplits (dispatcher)
                                                           └─► forebay.append

A span's parent travels as W3C's `traceparent`: in messages to workers, and in calls' metadata. If
nobody asks, nothing of OpenTelemetry is imported, and nothing is sent.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ..storage.extras import install

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

log = logging.getLogger(__name__)

KEY = "traceparent"
"""The key of a call's metadata."""

FLUSH_S = 2.0

_API = "opentelemetry.trace"
_SAMPLED = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-01")
_ENDPOINTS = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOLS = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"

_own: list[TracerProvider | None] = []
"""The provider that this process made from its environment; empty: nobody has looked yet."""


def tracer(part: str) -> Tracer | None:
    """For the spans of a "trainer", "worker" or "dispatcher"; None if nobody asks for traces.

    The process's tracer provider, if it has installed one; else what the environment's OTEL_
    variables ask for. Cheap: ask for each consumer and task.
    """
    if not _own:
        _own.append(_asked_for(part))  # of two threads at once, the first one's is used
    provider = _own[0]
    if _API in sys.modules:
        from opentelemetry import trace

        try:
            installed = trace.get_tracer_provider()
        except Exception as error:  # noqa: BLE001 - of the environment, as is StopIteration
            log.debug("OpenTelemetry has no tracer provider: %r", error)
            return None
        if not isinstance(installed, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            provider = installed
    return None if provider is None else provider.get_tracer("forebay")


def _asked_for(part: str) -> TracerProvider | None:
    """A provider that exports what the environment asks for, in the background."""
    of = os.environ.get
    asked = of("OTEL_TRACES_EXPORTER") or ("otlp" if any(map(of, _ENDPOINTS)) else "none")
    exporters = [name for name in map(str.strip, asked.split(",")) if name not in ("", "none")]
    if not exporters or of("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    is_grpc = next(filter(None, map(of, _PROTOCOLS)), "") == "grpc"
    otlp = "otlp_proto_grpc" if is_grpc else "otlp_proto_http"
    exporter = asked
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        has_name = of("OTEL_SERVICE_NAME") or "service.name=" in of("OTEL_RESOURCE_ATTRIBUTES", "")
        own = {} if has_name else {"service.name": f"forebay-{part}"}
        provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        known = importlib.metadata.entry_points(group="opentelemetry_traces_exporter")
        made = []
        for exporter in exporters:
            name = otlp if exporter == "otlp" else exporter
            if name not in known.names:
                raise LookupError(f"{name} is none of {', '.join(sorted(known.names))}")
            made.append(known[name].load()())
        for each in made:
            provider.add_span_processor(BatchSpanProcessor(each))
    except Exception as error:  # noqa: BLE001 - whatever a variable is wrong about
        log.warning(
            "the environment asks for traces by OTEL_… variables, and there are none: the exporter "
            "%s cannot be used (%r): correct the variables, %s if it is missing, or set "
            "OTEL_TRACES_EXPORTER=none",
            exporter, error, install("otel"),
        )  # fmt: skip
        return None
    _flush_at_exit(provider)
    return provider


def _flush_at_exit(provider: Any) -> None:
    """Send what is left when the process ends, for FLUSH_S at most: the receiver may hang."""
    ends = threading.Event()

    def flush() -> None:
        ends.wait()
        provider.shutdown()

    flusher = threading.Thread(target=flush, name="forebay-traces", daemon=True)
    flusher.start()  # now: no thread can be started at the exit

    def end() -> None:
        ends.set()
        flusher.join(FLUSH_S)

    atexit.register(end)


def traceparent(span: Span) -> str:
    """By which others make it their spans' parent; "" if it is not sampled."""
    of = span.get_span_context()
    return f"00-{of.trace_id:032x}-{of.span_id:016x}-01" if of.trace_flags.sampled else ""


def parent(text: str) -> Context | None:
    """The context of a child of that `traceparent`; None if it is malformed, or not sampled."""
    if not _SAMPLED.fullmatch(text):
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({KEY: text})


def metadata() -> tuple[tuple[str, str], ...]:
    """Of a call: the current span is its parent, if there is one that is sampled."""
    if _API not in sys.modules:
        return ()
    from opentelemetry import trace

    text = traceparent(trace.get_current_span())
    return ((KEY, text),) if text else ()


def child(tracer: Tracer | None, name: str, sequence: int) -> AbstractContextManager[object]:
    """A child of the current span, if that is recorded; both have the journal's sequence."""
    if tracer is None:
        return nullcontext()
    from opentelemetry import trace

    if not (current := trace.get_current_span()).is_recording():
        return nullcontext()
    about = {"forebay.sequence": sequence}
    current.set_attributes(about)
    return tracer.start_as_current_span(name, attributes=about)


class WaitSpans:
    """Of a consumer: one for each of its waits, of which its workers hear. For one thread."""

    def __init__(self, tell: Callable[[str], None], **about: int) -> None:
        """`tell` takes the `traceparent` of a wait that begins, and "" when it ends."""
        self._tracer = tracer("trainer")
        self._tell = tell
        self._about = {f"forebay.{name}": value for name, value in about.items()}
        self._span: Span | None = None
        self._told = False

    def begin(self) -> None:
        """Begin a span, unless one is open."""
        if self._tracer is not None and self._span is None:
            self._span = self._tracer.start_span("forebay.next", attributes=self._about)
            if text := traceparent(self._span):
                self._told = True
                self._tell(text)

    def end(self, elements: int = 0) -> None:
        """It has what it waited for. Idempotent."""
        span, self._span = self._span, None
        if span is not None:
            span.set_attribute("forebay.elements", elements)
            span.end()
            if self._told:
                self._told = False
                self._tell("")


class MakeSpans:
    """Of a task: one from when a consumer says that it waits, until a block is made. Thread-safe.

    If several wait, it is of the first one's trace.
    """

    def __init__(self, **about: int) -> None:
        self._tracer = tracer("worker")
        self._about = {f"forebay.{name}": value for name, value in about.items()}
        self._span: Span | None = None
        self._lock = threading.Lock()

    def begin(self, waits: str) -> None:
        """`waits` is the `traceparent` of a consumer's wait."""
        if self._tracer is None or (context := parent(waits)) is None:
            return
        with self._lock:
            if self._span is None:
                self._span = self._tracer.start_span(
                    "forebay.make", context, attributes=self._about
                )

    def end(self, elements: int = 0) -> None:
        """A block is made, or the task ends."""
        if self._span is None:
            return
        with self._lock:
            span, self._span = self._span, None
        if span is not None:
            span.set_attribute("forebay.elements", elements)
            span.end()

    def current(self) -> AbstractContextManager[object]:
        """Calls within it are part of the block's making."""
        if (span := self._span) is None:
            return nullcontext()
        from opentelemetry import trace

        return trace.use_span(span, record_exception=False, set_status_on_exception=False)
