"""The report of a run, for programs (JSON) and for people (a table)."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import msgspec

from ..journal.codec import decode
from ..journal.verification import verify
from ..storage import open_storage
from .audit import Verdict, check, check_lives
from .claims_audit import check_claims
from .cluster import IN_HAND, Cluster, Options
from .dataset import PASSES
from .faults import DoneFault, Faults
from .history import History, read_history
from .ordered_audit import check_order
from .ordered_audit import consumers as members
from .partitions import Partition, failed_cut_off
from .trainer import JOB


class Hit(msgspec.Struct, frozen=True):
    """A fault that hit a process, for reading the logs."""

    at_s: float  # after the faults' beginning
    kind: str
    name: str  # of the process


class ChaosReport(msgspec.Struct):
    """The result of a chaos run."""

    options: Options
    faults_s: float  # how long there were faults
    hits: list[Hit]
    faults: dict[str, int]  # by kind
    missed: int  # faults that hit no process
    partitions: list[Partition]  # in seconds after the faults' beginning
    cut_off: list[str]  # processes that failed because they were cut off
    ended_by_themselves: list[str]  # processes, with the end of their logs
    verdict: Verdict  # of the trainers, and all broken promises
    claims: Verdict  # of the trainers that read at least once
    ordered: Verdict  # of the trainers that read in order
    journal_events: int
    journal_terms: int
    journal_sound: bool

    @property
    def kept(self) -> bool:
        """Whether every promise was kept."""
        return not self.verdict.broken


def judge(
    cluster: Cluster, faults: Faults, options: Options, began_s: float, ended_s: float
) -> ChaosReport:
    """Check everything, after all dispatchers have ended. The storage must be readable."""
    storage = open_storage(cluster.storage)
    try:
        verified = verify(storage)
        history = read_history(
            (record.sequence, record.term, decode(record.sequence, record.data))
            for record in storage.read()
        )
    finally:
        storage.close()
    lives, partitions = cluster.lives, cluster.partitions
    wall_s = time.time() - time.monotonic()
    consumers = cluster.records.consumers() | members(history, lives.values(), wall_s)
    failed = (life for life in lives.values() if life.code and life.killed_s is None)
    hosts = {life.name: life.host for life in failed}
    cut_off = failed_cut_off(history, consumers, hosts, partitions, wall_s)
    elements = options.elements
    verdict = check(
        history, JOB, cluster.records.of_trainers(), lives,
        elements=elements, passes=PASSES, in_hand=IN_HAND, partitions=partitions,
    )  # fmt: skip
    claims = check_claims(history, cluster.records.of_trainers("claimer"), elements=elements)
    ordered = check_order(cluster.records.of_trainers("ordered"), elements=elements)
    verdict.broken += [*check_lives(lives.values(), cut_off), *claims.broken, *ordered.broken]
    verdict.broken += [f"the journal: {problem}" for problem in verified.problems]
    kinds = [(_kind(done, cluster, history), done) for done in faults.done]
    done = [(kind, done) for kind, done in kinds if done.name is not None]
    return ChaosReport(
        options=options,
        faults_s=round(ended_s - began_s, 1),
        hits=[Hit(round(d.at_s - began_s, 2), kind, d.name or "") for kind, d in done],
        faults=dict(sorted(Counter(kind for kind, _ in done).items())),
        missed=len(kinds) - len(done),
        cut_off=sorted(cut_off),
        partitions=[
            Partition(
                p.sides, round(p.since_s - began_s, 2), round(p.until_s - began_s, 2), p.one_way
            )
            for p in partitions
        ],
        ended_by_themselves=[
            f"{life.name}: {life.last_words}" for life in lives.values() if life.ended_by_itself
        ],
        verdict=verdict,
        claims=claims,
        ordered=ordered,
        journal_events=history.events,
        journal_terms=len(history.leaders),
        journal_sound=verified.ok,
    )


def _kind(done: DoneFault, cluster: Cluster, history: History) -> str:
    """The fault's kind; with several dispatchers, it names the leader or a standby."""
    fault = done.fault
    if fault.role != "dispatcher" or len(cluster.addresses) == 1:
        return fault.kind
    leads = history.leader_at(done.at_ms) == cluster.addresses[fault.number]
    return f"{fault.action} {'leader' if leads else 'standby'}"


def render(report: ChaosReport) -> Any:
    """The report as tables for rich."""
    from rich.table import Table

    verdict, options = report.verdict, report.options
    found = Table(show_header=False, title=f"forebay chaos, seed {options.seed}",
                  title_justify="left")  # fmt: skip
    cluster = f"{options.dispatchers} dispatchers, {options.workers} workers, "
    apart = ", each on a host of its own" if options.hosts else ""
    found.add_row("cluster", f"{cluster}{options.trainers} trainers on {options.storage}{apart}")
    found.add_row(
        "faults",
        f"{len(report.hits)} in {report.faults_s:.0f} s; {report.missed} more found nobody",
    )
    if report.cut_off:
        found.add_row("failed, cut off", ", ".join(report.cut_off))
    found.add_row("ended by themselves", "\n".join(report.ended_by_themselves) or "none")
    found.add_row("epochs", f"{verdict.epochs} of {PASSES} × {options.elements} elements")
    found.add_row("delivered", str(verdict.delivered))
    found.add_row("delivered twice", str(verdict.twice))
    for excuse, count in sorted(verdict.lost.items()):
        found.add_row("lost, as the journal says", f"{count}: {excuse}")
    found.add_row("lost otherwise", str(verdict.lost_unexplained))
    for how, of in (("at least once", report.claims), ("in order", report.ordered)):
        found.add_row(
            how,
            f"{of.epochs} epochs of {options.elements} elements; delivered {of.delivered}, "
            f"{of.twice} of them again, {of.lost_unexplained} lost",
        )
    journal = f"{report.journal_events} events in {report.journal_terms} terms, "
    found.add_row("journal", journal + ("sound" if report.journal_sound else "NOT SOUND"))
    faults = ", ".join(f"{kind} {hits}" for kind, hits in report.faults.items())
    found.add_row("faults by kind", faults or "none")
    return found
