"""Sessions: all consumers and tasks of a worker, and what to send on which connection next.

sending.py has the state of one consumer. The delivery policies (service/delivery) decide which
block a subscription gets. One lock guards all state, held for microseconds: never during I/O, and
not while elements are copied, which are only chosen under it.
One invariant keeps consumers from starving one another: as long as a task has a block for some send
buffer, no connection of such a buffer that has credit is idle. So a new block goes to the
connection that was idle longest. A connection that finishes sending may take the next block without
starving others.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

from ..delivery import ANY, End, ReadRequest, Subscription, TaskOutput, TaskUnknown
from ..errors import ProtocolError
from ..proto import transfer_pb2 as pb
from .messages import Key
from .sending import Connection, Ended, Farewell, Idle, Outgoing, Refusal, SendBuffer, Session

MAX_CREDIT_BYTES = 64 << 30
MAX_CREDIT_ELEMENTS = 1 << 40
MAX_AWAY_BYTES = 1 << 30  # for all consumers without a connection, which may never return
MAX_WAITING_REPLIES = 1000
MAX_BLOCKS = 1 << 62
MAX_BUFFERS = 10_000  # of one consumer


class Sessions:
    """All consumers of a worker. Thread-safe."""

    def __init__(self, linger_s: float, max_away_bytes: int = MAX_AWAY_BYTES) -> None:
        self._linger_s = linger_s
        self._max_away_bytes = max_away_bytes
        self._lock = threading.Lock()
        self._acknowledged = threading.Condition(self._lock)
        self._outputs: dict[int, TaskOutput] = {}
        self._iterations: dict[int, int] = {}  # by task
        self._by_consumer: dict[int, Session] = {}
        self.idle = Idle()
        self._refusal: Refusal | None = None  # the answer to every new connection
        self.connections = self.reconnects = 0  # so far; of known consumers

    def add_task(self, task_id: int, output: TaskOutput, iteration_id: int = 0) -> None:
        """Let consumers of the iteration read the task. Raises ValueError if it is being served
        already."""
        with self._lock:
            if task_id in self._outputs:
                raise ValueError(f"task {task_id} is being served already")
            self._outputs[task_id] = output
            self._iterations[task_id] = iteration_id
        output.on_change = self._output_changed

    def remove_task(self, task_id: int) -> None:
        """Further consumers of the task get TaskUnknown; an unknown task is no error.

        If the task's output has ended, its current readers still get their blocks; otherwise the
        output is cancelled.
        """
        with self._lock:
            output = self._outputs.pop(task_id, None)
            self._iterations.pop(task_id, None)
        if output is not None and not output.ended:
            output.cancel()

    def attach(
        self, consumer_id: int, cut: Callable[[], None], iteration_id: int | None = None
    ) -> Connection:
        """Add a consumer's connection, and cut an earlier one of the same consumer. With
        `iteration_id` it may read tasks of that iteration only."""
        with self._lock:
            self.connections += 1
            self.reconnects += consumer_id in self._by_consumer
            session = self._by_consumer.setdefault(consumer_id, Session(consumer_id))
            if session.connection is not None:
                session.connection.close()
                session.connection.cut()
            session.connection = Connection(session, self._lock, cut, iteration_id)
            if self._refusal is not None:
                session.connection.refuse(self._refusal)
            return session.connection

    def detach(self, connection: Connection, now: float | None = None) -> None:
        """The connection has ended; its consumer may reconnect within `linger_s` from `now` on.
        None: it never will, as its process has ended."""
        with self._lock:
            connection.close()
            session = connection.session
            if session.connection is not connection:
                return
            session.connection = None
            if now is None or not session.buffers:
                self._drop(session)
            else:
                session.left_at = now
                for each in _beyond(self._by_consumer.values(), self._max_away_bytes):
                    self._drop(each)

    def goodbye(self, connection: Connection, positions: Iterable[pb.Position]) -> None:
        """The consumer said goodbye: take back what it hands back, and answer with a farewell."""
        with self._lock:
            if connection.closed or connection.session.connection is not connection:
                return  # another connection has taken its place
            connection.ending = True  # so that it gets nothing more, such as what it hands back
            for position in positions:
                key = position.task_id, position.subscription
                buffer = connection.session.buffers.get(key)
                if buffer is not None and buffer.subscription.hands_back:
                    buffer.received(position.received)
                    buffer.hand_back(position.taken, position.elements)
                    del connection.session.buffers[key]
                    self.idle.wake_readers(buffer.subscription.output)
            self._drop(connection.session)
            connection.outbox.clear()
            connection.outbox.append(Farewell())
            connection.ready.notify()

    def away(self) -> list[int]:
        """The consumers that have no connection, and may reconnect."""
        with self._lock:
            return [i for i, session in self._by_consumer.items() if session.connection is None]

    def forget_gone(self, consumer_ids: Iterable[int]) -> int:
        """Drop these consumers' sessions, unless connected; return how many elements they lack."""
        lacking = 0
        with self._lock:
            for consumer_id in consumer_ids:
                session = self._by_consumer.get(consumer_id)
                if session is not None and session.connection is None:
                    lacking += sum(session.lacking().values())
                    self._drop(session)
        return lacking

    def expire(self, now: float) -> None:
        """Drop the sessions of consumers that did not reconnect within `linger_s`."""
        with self._lock:
            for session in list(self._by_consumer.values()):
                if session.connection is None and now - session.left_at > self._linger_s:
                    self._drop(session)

    def trace(self, connection: Connection, traceparent: str, task_id: int = 0) -> None:
        """Tell the outputs of the tasks that it reads, and of `task_id`, which it may be about to
        read."""
        with self._lock:
            tasks = {key[0] for key in connection.session.buffers}
            if connection.iteration_id in (None, self._iterations.get(task_id)):
                tasks.add(task_id)
            outputs = [self._outputs[i] for i in tasks if i in self._outputs]
        for output in outputs:
            output.on_trace(traceparent)

    def read(
        self,
        connection: Connection,
        task_id: int,
        received: int,
        request: ReadRequest = ANY,
        subscription: int = 0,
    ) -> None:
        """Start or resume reading a task on this connection.

        The consumer has received `received` blocks. `request` describes the blocks that follow; it
        is ignored if the session still has the buffer. `subscription` distinguishes several
        subscriptions of one task.
        """
        key = task_id, subscription
        output = None
        with self._lock:
            if connection.closed:
                return
            mine = connection.iteration_id
            if mine is not None and self._iterations.get(task_id, mine) != mine:
                raise ProtocolError(
                    f"task {task_id} is not one of iteration {mine}, which its credential is for"
                )
            buffer = connection.session.buffers.get(key)
            if buffer is not None and buffer.connection is connection:
                raise ProtocolError(f"task {task_id} was asked for twice on one connection")
            if received > MAX_BLOCKS:
                raise ProtocolError(f"nobody can have received {received} blocks of task {task_id}")
            if buffer is None:
                if len(connection.session.buffers) >= MAX_BUFFERS:
                    raise ProtocolError(f"{MAX_BUFFERS} tasks and bundles are read already")
                output = self._outputs.get(task_id)
                if output is None:
                    opened: Subscription | End = TaskUnknown()
                else:
                    opened = output.open(request, notify=False)
                    self.idle.wake_readers(output)  # `open` may have ended their subscriptions
                if not isinstance(opened, Subscription):
                    if len(connection.outbox) >= MAX_WAITING_REPLIES:
                        waiting = len(connection.outbox)
                        raise ProtocolError(f"{waiting} replies wait, and it reads none of them")
                    connection.outbox.append(Ended(task_id, opened, subscription))
                    connection.ready.notify()
                    return
                buffer = connection.session.buffers[key] = SendBuffer(
                    key, opened, received, connection.session
                )
            if connection.resubscribed is not None:
                connection.resubscribed.add(key)
            buffer.received(received)
            buffer.resume(connection)
            self.idle.wake(connection)
        if output is not None:
            output.notify_opened()

    def give_credit(
        self,
        connection: Connection,
        size: int,
        positions: Iterable[pb.Position],
        elements: int | None = None,
    ) -> None:
        """Grant `size` more bytes of credit, and acknowledge blocks up to `positions`.

        Once a message has `elements`, elements need credit, too. Before its first credit the
        consumer must ask again for all that it reads: other buffers of its session are closed.
        """
        with self._lock:
            if connection.closed:  # another connection has taken its place
                return
            if connection.resubscribed is not None:
                unwanted = connection.session.buffers.keys() - connection.resubscribed
                connection.resubscribed = None
                self._close_buffers(connection.session, unwanted)
            connection.credit += size
            if elements is not None:
                connection.elements = (connection.elements or 0) + elements
            size, elements = connection.credit, connection.elements
            if size > MAX_CREDIT_BYTES or (elements or 0) > MAX_CREDIT_ELEMENTS:
                raise ProtocolError(f"a credit of {size} bytes and {elements} elements is absurd")
            for position in positions:
                key = position.task_id, position.subscription
                buffer = connection.session.buffers.get(key)
                if buffer is not None:
                    buffer.received(position.received)
                    if position.taken and buffer.taken(position.taken):
                        self.idle.wake_readers(buffer.subscription.output)
            self._acknowledged.notify_all()
            self.idle.wake(connection)

    def stop_reading(self, connection: Connection, task_id: int, subscription: int = 0) -> None:
        """Close the subscription: the consumer wants no more of it, or has received its end."""
        key = task_id, subscription
        with self._lock:
            if connection.closed:
                return
            buffer = connection.session.buffers.get(key)
            if buffer is not None and buffer.connection is connection:
                connection.remove(buffer)
            if connection.resubscribed is not None:
                connection.resubscribed.discard(key)
            self._close_buffers(connection.session, [key])
            self._acknowledged.notify_all()

    def refuse(self, connection: Connection, reason: str) -> None:
        """The consumer broke a rule: send this after the outbox, and then nothing more."""
        with self._lock:
            connection.refuse(Refusal(reason, broken=True))

    def refuse_all(self, reason: str) -> None:
        """Send this refusal to all consumers, also to those that connect later."""
        with self._lock:
            self._refusal = Refusal(reason, broken=False)
            for session in self._by_consumer.values():
                if session.connection is not None:
                    session.connection.refuse(self._refusal)

    def next_batch(self, connection: Connection) -> list[Outgoing] | None:
        """Wait for something to send on the connection; return it, or None once that is closed."""
        with self._lock:
            while not connection.closed:
                connection.fill()
                if connection.outbox:
                    batch = list(connection.outbox)
                    connection.outbox.clear()
                    connection.closed = connection.ending
                    return batch
                self.idle[connection] = None
                connection.ready.wait(connection.retry_s())  # for what the outbox has
                self.idle.pop(connection, None)
        return None

    def read_tasks(self) -> set[int]:
        """The tasks that a consumer reads now, or may reconnect to read."""
        with self._lock:
            return {key[0] for session in self._by_consumer.values() for key in session.buffers}

    def forget_all(self) -> None:
        """Cut every connection, cancel every task, and forget all tasks and consumers."""
        with self._lock:
            outputs = list(self._outputs.values())
            self._outputs.clear()
            self._iterations.clear()
            for session in list(self._by_consumer.values()):
                if session.connection is not None:
                    session.connection.close()
                    session.connection.cut()
                self._drop(session)
        for output in outputs:
            output.cancel()

    def wait_until_received(self, timeout_s: float) -> Counter[int]:
        """Wait until consumers have acknowledged all blocks that they were given, or `timeout_s`
        is over. Returns how many elements of each task they still lack.
        """

        def lacking() -> Counter[int]:
            return sum((s.lacking() for s in self._by_consumer.values()), Counter())

        with self._lock:
            self._acknowledged.wait_for(lambda: not lacking(), timeout_s)
            return lacking()

    def _close_buffers(self, session: Session, keys: Iterable[Key]) -> None:
        for key in keys:
            if (buffer := session.close_buffer(key)) is not None:
                self.idle.wake_readers(buffer.subscription.output)  # they may get what it left

    def _output_changed(
        self, output: TaskOutput, changed: Iterable[Subscription] | None = None
    ) -> None:
        with self._lock:
            if changed is None:
                for session in self._by_consumer.values():
                    if (connection := session.connection) is not None:
                        for buffer in list(connection.asleep):
                            if buffer.subscription.output is output:
                                connection.wake(buffer)
                self.idle.wake_readers(output)
                return
            connections: dict[Connection, None] = {}
            for subscription in changed:
                carrier = subscription.carrier
                if isinstance(carrier, SendBuffer) and carrier.connection is not None:
                    carrier.connection.wake(carrier)
                    connections[carrier.connection] = None
            for connection in connections:
                self.idle.wake(connection)

    def _drop(self, session: Session) -> None:
        if self._by_consumer.get(session.consumer_id) is session:
            del self._by_consumer[session.consumer_id]
        self._close_buffers(session, list(session.buffers))
        self._acknowledged.notify_all()


def _beyond(sessions: Iterable[Session], most_bytes: int) -> list[Session]:
    """Those that are away longest, so that the others keep no more: a trainer may crash often."""
    away = sorted((s for s in sessions if s.connection is None), key=lambda s: s.left_at)
    kept = sum(session.retained_bytes for session in away)
    beyond = []
    for session in away:
        if kept <= most_bytes:
            break
        kept -= session.retained_bytes
        beyond.append(session)
    return beyond
