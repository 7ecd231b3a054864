"""Which consumer is given what: all of a worker's, and its tasks (sending.py has one consumer's).

Which block goes to whom is the policy's (service/delivery), whose subscriptions are asked for the
next one. One lock guards all of it, held for microseconds and never during I/O. What keeps
consumers from starving one another is one invariant: as long as a task has a block for some
sending, no such link that has credit is idle. So a new block goes to the link that has been idle
longest, and one that finishes sending takes the next block without robbing anybody.
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
MAX_AWAY_BYTES = 1 << 30  # for all consumers that have no connection, and may not come again
MAX_WAITING_REPLIES = 1000
MAX_BLOCKS = 1 << 62
MAX_SENDINGS = 10_000  # of one consumer


class Sessions:
    """All consumers of a worker. Thread-safe."""

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._acknowledged = threading.Condition(self._lock)
        self._outputs: dict[int, TaskOutput] = {}
        self._sessions: dict[int, Session] = {}
        self._idle: dict[Link, None] = {}  # whose sender waits, the longest first
        self._refusal: Refusal | None = None  # what whoever comes now is told

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
        """A consumer has connected; an earlier connection of the same one is cut."""
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
        """The connection has ended; its consumer has some time to come again."""
        with self._lock:
            self._close(link)
            if link.session.link is link:
                link.session.link = None
                link.session.left_at = now
                if not link.session.sendings:
                    self._drop(link.session)
                self._bound_what_is_kept()

    def goodbye(self, link: Link, positions: Iterable[pb.Position]) -> None:
        """The consumer has said goodbye: what it hands back is for others. It is told so."""
        with self._lock:
            if link.closed or link.session.link is not link:
                return  # another connection has taken its place
            link.ending = True  # it is given nothing more, of what it hands back either
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
        """The consumer has gone without a word."""
        with self._lock:
            self._close(link)
            if link.session.link is link:
                self._drop(link.session)

    def away(self) -> list[int]:
        """The consumers that have no connection, and may come again."""
        with self._lock:
            return [i for i, session in self._sessions.items() if session.link is None]

    def forget_gone(self, consumer_ids: Iterable[int]) -> int:
        """These will not come again, unless they have by now: how many elements they lack."""
        lacking = 0
        with self._lock:
            for consumer_id in consumer_ids:
                session = self._sessions.get(consumer_id)
                if session is not None and session.link is None:
                    lacking += sum(session.lacking().values())
                    self._drop(session)
        return lacking

    def expire(self, now: float) -> None:
        """Forget the consumers that have not come again."""
        with self._lock:
            for session in list(self._sessions.values()):
                if session.link is None and now - session.left_at > self._linger_s:
                    self._drop(session)

    def read(
        self, link: Link, task_id: int, received: int, order: Order = ANY, subscription: int = 0
    ) -> None:
        """Start or resume reading a task on this connection.

        The consumer has `received` blocks of it. `order` says what follows them; who resumes what
        the session still has gets that. `subscription` tells several of one task apart.
        """
        key = task_id, subscription
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
                    opened = output.open(order)
                    self._wake_readers(output)  # those whose subscriptions it has ended
                if not isinstance(opened, Subscription):
                    self._reply(link, Ended(task_id, opened, subscription))
                    return
                sending = link.session.sendings[key] = Sending(key, opened, received)
            if link.goes_on_with is not None:
                link.goes_on_with.add(key)
            sending.received(received)
            sending.resume(link)
            link.sendings.append(sending)
            self._wake(link)

    def give_credit(
        self,
        link: Link,
        size: int,
        positions: Iterable[pb.Position],
        elements: int | None = None,
    ) -> None:
        """The consumer can take `size` more bytes, and has received what the positions say.

        From the first time on that it gives `elements`, it takes so many more, and no others.
        Before its first credit it has said what it reads; what it read before, and does not now,
        it wants no more.
        """
        with self._lock:
            if link.closed:  # another connection has taken its place
                return
            if link.goes_on_with is not None:
                unwanted = link.session.sendings.keys() - link.goes_on_with
                link.goes_on_with = None
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
        """The consumer wants no more of it, nor what it has not received; or has heard its end."""
        key = task_id, subscription
        with self._lock:
            if link.closed:
                return
            link.sendings = deque(s for s in link.sendings if s.key != key)
            if link.goes_on_with is not None:
                link.goes_on_with.discard(key)
            self._close_sendings(link.session, [key])
            self._acknowledged.notify_all()

    def refuse(self, link: Link, reason: str) -> None:
        """The consumer broke a rule: send this after what is on its way, and nothing more."""
        with self._lock:
            self._refuse(link, Refusal(reason, broken=True))

    def refuse_all(self, reason: str) -> None:
        """Send this to all consumers, and to those that come later."""
        with self._lock:
            self._refusal = Refusal(reason, broken=False)
            for session in self._sessions.values():
                if session.link is not None:
                    self._refuse(session.link, self._refusal)

    def next_batch(self, link: Link) -> list[Outgoing] | None:
        """What to send on the link now; waits for it. None when the link is closed."""
        with self._lock:
            while not link.closed:
                link.fill()
                if link.outbox:
                    batch = list(link.outbox)
                    link.outbox.clear()
                    link.closed = link.ending
                    return batch
                self._idle[link] = None
                link.ready.wait()  # for _wake, _reply, refuse or _close
                self._idle.pop(link, None)
            return None

    def is_read(self, task_id: int) -> bool:
        """Does a consumer read the task now, or may it come again to do so?"""
        with self._lock:
            sessions = self._sessions.values()
            return any(task_id == key[0] for session in sessions for key in session.sendings)

    def forget_all(self) -> None:
        """Cut every connection, and know of no task and no consumer."""
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
        """Wait until no consumer lacks a block that was handed to it; how many elements of each
        task are lacking then.
        """

        def lacking() -> Counter[int]:
            return sum((s.lacking() for s in self._sessions.values()), Counter())

        with self._lock:
            self._acknowledged.wait_for(lambda: not lacking(), timeout_s)
            return lacking()

    def _close_sendings(self, session: Session, keys: Iterable[Key]) -> None:
        for key in keys:
            if (sending := session.close_sending(key)) is not None:
                self._wake_readers(sending.subscription.output)  # of what it leaves to others

    def _output_changed(self, output: TaskOutput) -> None:
        with self._lock:
            self._wake_readers(output)

    def _wake_readers(self, output: TaskOutput) -> None:
        for link in list(self._idle):
            if any(sending.subscription.output is output for sending in link.sendings):
                self._wake(link)

    def _wake(self, link: Link) -> None:
        """Give an idle link what there is for it."""
        if link in self._idle:
            link.fill()
            if link.outbox:
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
        link.outbox.clear()  # nothing of it is sent any more
        self._idle.pop(link, None)
        link.ready.notify()

    def _bound_what_is_kept(self) -> None:
        """Forget those who have been away longest, as of a trainer that crashes again and again."""
        away = sorted(
            (session for session in self._sessions.values() if session.link is None),
            key=lambda session: session.left_at,
        )
        kept = sum(session.retained_bytes for session in away)
        for session in away:
            if kept <= MAX_AWAY_BYTES:
                break
            kept -= session.retained_bytes
            self._drop(session)

    def _drop(self, session: Session) -> None:
        if self._sessions.get(session.consumer_id) is session:
            del self._sessions[session.consumer_id]
        self._close_sendings(session, list(session.sendings))
        self._acknowledged.notify_all()
