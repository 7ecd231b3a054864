"""An S3 server (moto's) behind a proxy that is slow, fails and counts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import boto3
from aiohttp import web
from moto.server import ThreadedMotoServer

ACCESS_KEY, SECRET_KEY = "AKIAFOREBAYTEST00001", "a+secret/that-nobody-may-see"
BUCKET = "data"


@dataclasses.dataclass
class Faults:
    """How often a request of an object fails."""

    latency_s: float = 0.0
    unavailable: float = 0.0  # answered 503 or 429
    cut: float = 0.0  # the body ends early
    reset: float = 0.0  # the connection ends before an answer


class Proxy:
    """On loopback, in a thread of its own."""

    def __init__(self, server: str) -> None:
        self._server = server
        self.faults = Faults()
        self.random = random.Random(1)
        self.before: Callable[[str], object] | None = None  # an answer, in a thread: by its path
        self.forget()
        self._at_once = 0
        self._loop = asyncio.new_event_loop()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._begun.wait()

    def forget(self) -> None:
        """Count from zero."""
        self.lists = self.gets = self.failed = self.sent_bytes = self.most_at_once = 0

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await web.SockSite(runner, listener).start()
        async with aiohttp.ClientSession(auto_decompress=False) as self._session:
            self._begun.set()
            await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        of_object = request.method == "GET" and "list-type" not in request.query
        if request.method == "GET":
            self.gets += of_object
            self.lists += not of_object
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(self.faults.latency_s)
        if self.before is not None:
            await asyncio.to_thread(self.before, request.path)
        self._at_once -= 1
        drawn = self.random.random() if of_object else 1.0
        faults = self.faults
        if drawn < faults.unavailable:
            self.failed += 1
            return web.Response(
                status=503 - 74 * (self.failed % 2), text="<Error><Code>SlowDown</Code></Error>"
            )
        if drawn < faults.unavailable + faults.reset:
            self.failed += 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        async with self._session.request(
            request.method, self._server + request.raw_path, headers=request.headers,
            data=await request.read(), allow_redirects=False,
        ) as answer:  # fmt: skip
            body = await answer.read()
        headers = {
            name: value
            for name, value in answer.headers.items()
            if name.lower() not in ("transfer-encoding", "connection", "content-length")
        }
        if request.method == "HEAD":
            headers["Content-Length"] = answer.headers.get("Content-Length", "0")
            return web.Response(status=answer.status, headers=headers)
        response = web.StreamResponse(status=answer.status, headers=headers)
        response.content_length = len(body)
        await response.prepare(request)
        if drawn < faults.unavailable + faults.reset + faults.cut:
            self.failed += 1
            await response.write(body[: len(body) // 2])
            assert request.transport is not None
            request.transport.abort()
            return response
        self.sent_bytes += len(body) if of_object and answer.status < 300 else 0
        await response.write(body)
        return response


class ObjectStore:
    """One bucket, and what to put into the environment of whoever reads it."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.proxy = Proxy(f"http://{host}:{port}")
        self.environment = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.proxy.url,
        }
        self.client: Any = boto3.client(
            "s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
        )  # fmt: skip
        self.client.create_bucket(Bucket=BUCKET)

    def close(self) -> None:
        self.proxy.close()
        self._server.stop()


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    made = ObjectStore()
    try:
        yield made
    finally:
        made.close()
