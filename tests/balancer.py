"""A TCP load balancer, as a process: each connection goes to the dispatcher that is SERVING.

    balancer.py HOST:PORT HOST:PORT …

It never moves a connection that was made, as the balancers do that people have.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


async def serving(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            answer = await check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def main(addresses: list[str]) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            for address in addresses:
                if await serving(address):
                    host, _, port = address.rpartition(":")
                    back, forth = await asyncio.open_connection(host, int(port))
                    await asyncio.wait(
                        [asyncio.create_task(copy(reader, forth)),
                         asyncio.create_task(copy(back, writer))],
                        return_when=asyncio.FIRST_COMPLETED,
                    )  # fmt: skip
                    forth.close()
                    break
        writer.close()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    print(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent closes it, or is gone


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
