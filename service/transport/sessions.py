"""Sessions: all consumers and tasks of a worker, and what to send on which connection next.

sending.py has the state of one consumer. The delivery policies (service/delivery) decide which
block a subscription gets. One lock guards all state, held for microseconds and never during I/O.
One invariant keeps consumers from starving one another: as long as a task has a block for some
sending, no link of such a sending that has credit is idle. So a new block goes to the link that was
idle longest. A link that finishes sending may take the next block without starving others.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable

from ..delivery import ANY, End, Order, Subscription, TaskOutput, TaskUnknown
from ..errors import ProtocolError
from ..proto import transfer_pb2 as pb
from .messages import Key
from .sending import Ended, Farewell, Link, Outgoing, Refusal, Sending, Session

MAX_CREDIT_BYTES = 64 << 30
MAX_CREDIT_ELEMENTS = 1 << 40
MAX_AWAY_BYTES = 1 << 30  # for all consumers without a connection, which may never return
MAX_WAITING_REPLIES = 1000
MAX_BLOCKS = 1 << 62
MAX_SENDINGS = 10_000  # of one consumer


class Sessions:
    """All consumers of a worker. Thread-safe."""

    def __init__(self, linger_s: float, max_away_bytes: int = MAX_AWAY_BYTES) -> None:
        self._linger_s = linger_s
        self._max_away_bytes = max_away_bytes
        self._lock = threading.Lock()
        self._acknowledged = threading.Condition(self._lock)
        self._outputs: dict[int, TaskOutput] = {}
        self._sessions: dict[int, Session] = {}
        self._idle: dict[Link, None] = {}  # whose sender waits, the longest first
        self._refusal: Refusal | None = None  # the answer to every new connection

    def add_task(self, task_id: int, output: TaskOutput) -> None:
        with self._lock:
            if task_id in self._outputs:
                raise ValueError(f"task {task_id} is being served already")
            self._outputs[task_id] = output
        output.on_change(self._output_changed)

    def remove_task(self, task_id: int) -> None:
        with self._lock:
            output = self._outputs.pop(task_id, None)
        if output is not None and not output.ended:
            output.cancel()

    def attach(self, consumer_id: int, cut: Callable[[], None]) -> Link:
        """Add a consumer's connection, and cut an earlier one of the same consumer."""
        with self._lock:
            session = self._sessions.setdefault(consumer_id, Session(consumer_id))
            if session.link is not None:
                self._close(session.link)
                session.link.cut()
            session.link = Link(session, self._lock, cut)
            if self._refusal is not None:
                self._refuse(session.link, self._refusal)
            return session.link

    def detach(self, link: Link, now: float) -> None:
        """The connection has ended; its consumer may reconnect within `linger_s`."""
        with self._lock:
            self._close(link)
            if link.session.link is link:
                link.session.link = None
                link.session.left_at = now
                if not link.session.sendings:
                    self._drop(link.session)
                self._bound_what_is_kept()

    def goodbye(self, link: Link, positions: Iterable[pb.Position]) -> None:
        """The consumer said goodbye: take back what it hands back, and answer with a farewell."""
        with self._lock:
            if link.closed or link.session.link is not link:
                return  # another connection has taken its place
            link.ending = True  # so that it gets nothing more, such as what it hands back
            for position in positions:
                key = position.task_id, position.subscription
                sending = link.session.sendings.get(key)
                if sending is not None and sending.subscription.hands_back:
                    sending.received(position.received)
                    sending.hand_back(position.taken, position.elements)
                    del link.session.sendings[key]
                    self._wake_readers(sending.subscription.output)
            self._drop(link.session)
            link.outbox.clear()
            link.outbox.append(Farewell())
            link.ready.notify()

    def forget(self, link: Link) -> None:
        """The consumer's process has ended without a goodbye: drop its session."""
        with self._lock:
            self._close(link)
            if link.session.link is link:
                self._drop(link.session)

    def away(self) -> list[int]:
        """The consumers that have no connection, and may reconnect."""
        with self._lock:
            return [i for i, session in self._sessions.items() if session.link is None]

    def forget_gone(self, consumer_ids: Iterable[int]) -> int:
        """Drop these consumers' sessions, unless connected; return how many elements they lack."""
        lacking = 0
        with self._lock:
            for consumer_id in consumer_ids:
                session = self._sessions.get(consumer_id)
                if session is not None and session.link is None:
                    lacking += sum(session.lacking().values())
                    self._drop(session)
        return lacking

    def expire(self, now: float) -> None:
        """Drop the sessions of consumers that did not reconnect within `linger_s`."""
        with self._lock:
            for session in list(self._sessions.values()):
                if session.link is None and now - session.left_at > self._linger_s:
                    self._drop(session)

    def read(
        self,
        link: Link,
        task_id: int,
        received: int,
        order: Order = ANY,
        subscription: int = 0,
        cut: pb.CutBlock | None = None,
    ) -> None:
        """Start or resume reading a task on this connection.

        The consumer has received `received` blocks, and the part of the next one that `cut`
        describes. `order` describes the blocks that follow; it is ignored if the session still has
        the sending. `subscription` distinguishes several subscriptions of one task.
        """
        key = task_id, subscription
        output = None
        with self._lock:
            if link.closed:
                return
            sending = link.session.sendings.get(key)
            if sending is not None and sending.link is link:
                raise ProtocolError(f"task {task_id} was asked for twice on one connection")
            if received > MAX_BLOCKS:
                raise ProtocolError(f"nobody can have received {received} blocks of task {task_id}")
            if sending is None:
                if len(link.session.sendings) >= MAX_SENDINGS:
                    raise ProtocolError(f"{MAX_SENDINGS} tasks and bundles are read already")
                output = self._outputs.get(task_id)
                if output is None:
                    opened: Subscription | End = TaskUnknown()
                else:
                    opened = output.open(order, notify=False)
                    self._wake_readers(output)  # `open` may have ended their subscriptions
                if not isinstance(opened, Subscription):
                    self._reply(link, Ended(task_id, opened, subscription))
                    return
                sending = link.session.sendings[key] = Sending(key, opened, received)
            if link.resubscribed is not None:
                link.resubscribed.add(key)
            sending.received(received)
            sending.resume(link, cut)
            self._wake(link)
        if output is not None:
            output.notify_opened()

    def give_credit(
        self,
        link: Link,
        size: int,
        positions: Iterable[pb.Position],
        elements: int | None = None,
    ) -> None:
        """Grant the link `size` more bytes of credit, and acknowledge blocks up to `positions`.

        Once a message has `elements`, elements need credit, too. Before its first credit the
        consumer must ask again for all that it reads: other sendings of its session are closed.
        """
        with self._lock:
            if link.closed:  # another connection has taken its place
                return
            if link.resubscribed is not None:
                unwanted = link.session.sendings.keys() - link.resubscribed
                link.resubscribed = None
                self._close_sendings(link.session, unwanted)
            link.credit += size
            if elements is not None:
                link.elements = (link.elements or 0) + elements
            if link.credit > MAX_CREDIT_BYTES or (link.elements or 0) > MAX_CREDIT_ELEMENTS:
                raise ProtocolError(
                    f"a credit of {link.credit} bytes and {link.elements} elements is absurd"
                )
            for position in positions:
                key = position.task_id, position.subscription
                sending = link.session.sendings.get(key)
                if sending is not None:
                    sending.received(position.received)
                    if position.taken and sending.taken(position.taken):
                        self._wake_readers(sending.subscription.output)
            self._acknowledged.notify_all()
            self._wake(link)

    def stop_reading(self, link: Link, task_id: int, subscription: int = 0) -> None:
        """Close the subscription: the consumer wants no more of it, or has received its end."""
        key = task_id, subscription
        with self._lock:
            if link.closed:
                return
            link.sendings = deque(s for s in link.sendings if s.key != key)
            if link.resubscribed is not None:
                link.resubscribed.discard(key)
            self._close_sendings(link.session, [key])
            self._acknowledged.notify_all()

    def refuse(self, link: Link, reason: str) -> None:
        """The consumer broke a rule: send this after the outbox, and then nothing more."""
        with self._lock:
            self._refuse(link, Refusal(reason, broken=True))

    def refuse_all(self, reason: str) -> None:
        """Send this refusal to all consumers, also to those that connect later."""
        with self._lock:
            self._refusal = Refusal(reason, broken=False)
            for session in self._sessions.values():
                if session.link is not None:
                    self._refuse(session.link, self._refusal)

    def next_batch(self, link: Link) -> list[Outgoing] | None:
        """Wait for something to send on the link, and return it. None when the link is closed."""
        with self._lock:
            while not link.closed:
                link.fill()
                if link.outbox:
                    batch = list(link.outbox)
                    link.outbox.clear()
                    link.closed = link.ending
                    return batch
                self._idle[link] = None
                link.ready.wait(link.retry_s())  # for _wake, _reply, refuse or _close
                self._idle.pop(link, None)
            return None

    def is_read(self, task_id: int) -> bool:
        """Whether a consumer reads the task now, or may reconnect to do so."""
        with self._lock:
            sessions = self._sessions.values()
            return any(task_id == key[0] for session in sessions for key in session.sendings)

    def read_tasks(self) -> set[int]:
        """The tasks of which `is_read` is true."""
        with self._lock:
            return {key[0] for session in self._sessions.values() for key in session.sendings}

    def forget_all(self) -> None:
        """Cut every connection, cancel every task, and forget all tasks and consumers."""
        with self._lock:
            outputs = list(self._outputs.values())
            self._outputs.clear()
            for session in list(self._sessions.values()):
                if session.link is not None:
                    self._close(session.link)
                    session.link.cut()
                self._drop(session)
        for output in outputs:
            output.cancel()

    def wait_until_received(self, timeout_s: float) -> Counter[int]:
        """Wait until consumers have acknowledged all blocks that they were given, or `timeout_s`
        is over. Returns how many elements of each task they still lack.
        """

        def lacking() -> Counter[int]:
            return sum((s.lacking() for s in self._sessions.values()), Counter())

        with self._lock:
            self._acknowledged.wait_for(lambda: not lacking(), timeout_s)
            return lacking()

    def _close_sendings(self, session: Session, keys: Iterable[Key]) -> None:
        for key in keys:
            if (sending := session.close_sending(key)) is not None:
                self._wake_readers(sending.subscription.output)  # they may get what it left

    def _output_changed(self, output: TaskOutput) -> None:
        with self._lock:
            self._wake_readers(output)

    def _wake_readers(self, output: TaskOutput) -> None:
        for link in list(self._idle):
            if any(sending.subscription.output is output for sending in link.sendings):
                self._wake(link)

    def _wake(self, link: Link) -> None:
        """Fill an idle link's outbox, and notify its sender if it has something to do."""
        if link in self._idle:
            link.fill()
            if link.outbox or link.retry_s() is not None:
                del self._idle[link]
                link.ready.notify()

    def _refuse(self, link: Link, refusal: Refusal) -> None:
        link.ending = True
        link.outbox.append(refusal)
        link.ready.notify()

    def _reply(self, link: Link, reply: Ended) -> None:
        if len(link.outbox) >= MAX_WAITING_REPLIES:
            raise ProtocolError(f"{len(link.outbox)} replies wait, and it reads none of them")
        link.outbox.append(reply)
        self._idle.pop(link, None)
        link.ready.notify()

    def _close(self, link: Link) -> None:
        link.closed = True
        link.outbox.clear()
        self._idle.pop(link, None)
        link.ready.notify()

    def _bound_what_is_kept(self) -> None:
        """Drop the sessions that have been away longest: a trainer may crash again and again."""
        away = sorted(
            (session for session in self._sessions.values() if session.link is None),
            key=lambda session: session.left_at,
        )
        kept = sum(session.retained_bytes for session in away)
        for session in away:
            if kept <= self._max_away_bytes:
                break
            kept -= session.retained_bytes
            self._drop(session)

    def _drop(self, session: Session) -> None:
        if self._sessions.get(session.consumer_id) is session:
            del self._sessions[session.consumer_id]
        self._close_sendings(session, list(session.sendings))
        self._acknowledged.notify_all()
