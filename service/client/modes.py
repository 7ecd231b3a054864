"""Modes: what a consumer (consumer.py) reads, and what comes next."""

from __future__ import annotations

import abc
from collections.abc import Iterable

from google.protobuf.message import Message

from ..blocks import Block
from ..delivery import End
from ..proto import forebay_pb2 as pb
from ..transport.messages import Key
from .heartbeats import News
from .links import Client, WorkerLink


class Mode(abc.ABC):
    """The reading thread calls all methods but those that say otherwise."""

    @abc.abstractmethod
    def take(self) -> tuple[Block, tuple[Client, int] | None] | None:
        """The next block, if it is here; and its client and task if the whole block is to be
        acknowledged there once the trainer has used it, and may be handed back until then.
        """

    def used(self, block: Block) -> None:  # noqa: B027
        """The trainer was given all of a block that came without a client."""

    @property
    @abc.abstractmethod
    def patience_s(self) -> float:
        """After how long without anything new `has_ended` and `ask_again` are due."""

    @abc.abstractmethod
    def has_ended(self) -> bool:
        """Whether no block comes any more."""

    @abc.abstractmethod
    def awaited(self) -> str:
        """In words, what the consumer waits for."""

    def report(self, request: pb.ConsumerHeartbeatRequest) -> None:  # noqa: B027
        """Complete a heartbeat. Called by any thread."""

    def position(self) -> int | None:
        """In an ordered read: elements of the training, over all consumers, before what the trainer
        is given next. Called by any thread."""
        return None

    def final_reports(self, consumer_id: int, left: int) -> Iterable[tuple[Message, type[Message]]]:
        """Requests to the dispatcher before the consumer leaves, and the types of their answers.
        The trainer was not given the last `left` elements of the block that `take` gave last.
        Called once, by any thread.
        """
        return ()

    def heard(self, news: News) -> None:  # noqa: B027
        """The dispatcher's news, before `update`. Called by the heartbeat thread."""

    def answered(self, news: News) -> bool:
        """The answer to a heartbeat, or to joining, before `heard`. Called by the heartbeat thread.
        Returns whether the reading thread has something new."""
        return False

    @abc.abstractmethod
    def update(self, news: News) -> None:
        """The dispatcher's news: read the tasks that it lists."""

    def arrived(self, client: Client, key: Key, block: Block) -> None:  # noqa: B027
        """A block has come, before `deliver`. Called by a transport thread."""

    @abc.abstractmethod
    def deliver(self, client: Client, key: Key, block: Block) -> None:
        """A block of this subscription has come."""

    def held_by_others(self, task_id: int) -> None:  # noqa: B027
        """Other consumers hold the task's last elements, and may hand them back."""

    @abc.abstractmethod
    def end(self, key: Key, end: End) -> None:
        """The worker sends nothing more of the subscription. Raises PipelineError if it failed."""

    @abc.abstractmethod
    def gone(self, link: WorkerLink) -> None:
        """The worker process of this link is gone."""

    @abc.abstractmethod
    def ask_again(self) -> None:
        """Ask for tasks that their workers did not know yet."""
