"""A run from its seed: the cluster, its work, and the faults that befall it.

Each seed draws which kinds of fault there are at all, so that some runs are all dispatcher kills
and others have nothing but a bad network: mixed evenly, faults hide one another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forebay.service.client.first_come import DEAD_IF_SILENT_S
from forebay.service.client.options import ShardingPolicy
from forebay.service.picks import shares

from .network import Weather
from .pipeline import Pipeline

FAULTS = (
    "kill dispatcher",
    "stop dispatcher",
    "pause dispatcher",
    "power failure",
    "kill worker",
    "drain worker",
    "pause worker",
    "kill trainer",
    "pause trainer",
    "partition",
    "cut connections",
    "storage trouble",
    "storage slow",
    "freeze worker",
)

ON_DEMAND = ("storage emptied", "isolate dispatcher")
"""Faults that no seed draws by itself."""
OLD_MODES = ("shared", "rounds", "cached", "static", "save")
MODES = (*OLD_MODES, "ordered", "claimed")
"""What is read how: a job that its trainers share, or each for themselves; a coordinated read;
through a cross-trainer cache; statically sharded; shared, while another dataset is saved; in
order; or at least once."""

ORDERED = 0.25
"""The share of seeds that read in order. It has chances of its own, as LATER has."""

CLAIMED = 0.2
"""The share of the others that read at least once."""

LATER = {"freeze worker"}
"""Kinds with chances of their own, so that the seeds from before them stay as they were."""


@dataclass
class Fault:
    """What happens, when (seconds from the start), and for how long."""

    kind: str
    at_s: float
    for_s: float
    steps: int  # further steps of threads, so that it may come between any two


@dataclass(frozen=True)
class Asked:
    """A read in order, or at least once, to which most of this means nothing."""

    seed: int
    shuffle: bool
    cycle_length: int
    block_length: int
    bundle_splits: int  # 0: the dispatcher chooses
    step: int  # elements of a global batch; 0: no batches
    drop_remainder: bool
    start: int  # position
    by_steps: bool  # who begins without a state begins at a step, if possible
    consumers: int  # at first
    window_bytes: int
    first_window: int
    portion_bytes: int
    large_bytes: int
    ahead: int
    ahead_bytes: int

    @property
    def sizes(self) -> list[int]:
        """How many consumers may read it."""
        return [of for of in (1, 2, 3) if not self.step % of]


@dataclass
class Scenario:
    """Everything that is drawn before a run begins."""

    files: bool
    dispatchers: int
    workers: int
    trainers: int
    policy: ShardingPolicy
    named: bool
    epochs: int
    pipeline: Pipeline
    step_s: float
    credit_bytes: int
    output_bytes: int
    weather: Weather
    preemption: float
    lease_ms: int
    worker_timeout_ms: int
    client_timeout_ms: int
    reconnect_grace_ms: int
    snapshot_events: int
    retention_hours: float
    same_ports: bool  # a worker that is started again has its data port, too
    neighbours: bool  # trainers are on the workers' hosts
    preempted: float = 0  # with this chance after each block, a trainer is told to stop
    leaves: float = 0  # with this chance after each block, a trainer leaves the epoch
    finished_retention_ms: int = 300_000
    unused_retention_s: float = -1
    removals: list[tuple[float, bool]] = field(default_factory=list)  # of the dataset: when, forced
    mode: str = "shared"
    steps: int = 0  # elements that a trainer takes of a coordinated or a cached read
    together: bool = False  # trainers of rounds wait for each other after each of them
    cache_bytes: int = 1 << 30
    pairs: bool = False  # two trainers have the same trainer_id
    any_port: bool = False  # a worker that is started again has another port
    spare: bool = False  # two workers are on the same host, which has one place
    chunk_bytes: int = 1 << 30  # of a save
    saved_splits: int = 0
    memory_budget: int = 1 << 30  # of a worker
    kept_pipelines: int = 1_000  # of tasks that nobody reads; without leases they would begin anew
    expected_s: float = 2.0  # for a task's first reader to come
    rejects: bool = False  # partitions are firewalls that reject, where dispatchers listen
    asked: Asked | None = None  # of a read in bundles
    skips: list[int] = field(default_factory=list)  # positions where somebody leaves out steps
    faults: list[Fault] = field(default_factory=list)

    @property
    def work_s(self) -> float:
        """How long it would take without faults, roughly."""
        pipeline = self.pipeline
        elements = len(pipeline.places()) * self.epochs
        if self.steps:
            elements = self.steps * self.trainers
        if self.asked is not None:
            elements = sum(map(pipeline.kept, range(pipeline.splits))) * self.epochs
        elements += self.saved_splits
        each = elements * (1 if self.policy is ShardingPolicy.OFF else 1 / self.workers)
        return 0.5 + each * pipeline.split_s + elements * self.step_s / self.trainers


def draw(seed: int, only: Sequence[str] = (), mode: str = "") -> Scenario:
    """The scenario of a seed; with `only` these kinds of faults, and with `mode` this one of MODES,
    whatever the seed says.
    """
    rng = random.Random(f"scenario {seed}")
    block_elements = rng.choice([1, 3, 8, 40])
    pipeline = Pipeline(
        splits=int(10 ** rng.uniform(1.3, 2.5)),
        providers=rng.choice([1, 1, 1, 2]),
        passes=rng.choice([1, 1, 1, 1, 2]),
        split_s=10 ** rng.uniform(-3.5, -1.3),
        block_elements=block_elements,
        alternate=rng.random() < 0.5,
    )
    # Of its own, so that what earlier seeds found is still found by them.
    repeats = random.Random(f"passes {seed}")
    if (roll := repeats.random()) < 0.15:
        pipeline = replace(pipeline, endless=True)
    elif roll < 0.3:
        times = repeats.randint(2, 6)
        pipeline = replace(pipeline, passes=times, splits=1 + pipeline.splits // times)
    bad = rng.random() < 0.4
    scenario = Scenario(
        files=rng.random() < 0.5,
        dispatchers=rng.choice([1, 2]),
        workers=rng.randint(1, 3),
        trainers=rng.randint(1, 3),
        policy=ShardingPolicy.OFF if rng.random() < 0.12 else ShardingPolicy.DYNAMIC,
        named=rng.random() < 0.8,
        epochs=rng.choice([1, 1, 1, 2]),
        pipeline=pipeline,
        step_s=rng.choice([0, 0, 1e-3, 2e-2]),
        credit_bytes=rng.choice([600, 3000, 20_000, 1 << 20]),
        output_bytes=rng.choice([600, 5000, 1 << 20]),
        weather=Weather(
            delay_s=10 ** rng.uniform(-4, -2),
            late=rng.choice([0, 0.01, 0.05]) if bad else 0,
            lost=rng.choice([0, 0.01, 0.05]) if bad else 0,
            doubled=rng.choice([0, 0.02, 0.1]) if bad else 0,
            pipe_bytes=rng.choice([300, 4096, 64 << 10]),
        ),
        preemption=rng.choice([0, 0.02, 0.1]),
        lease_ms=rng.choice([500, 2000]),
        worker_timeout_ms=rng.choice([6_000, 20_000, 60_000]),
        client_timeout_ms=rng.choice([20_000, 120_000]),
        reconnect_grace_ms=rng.choice([2_000, 5_000]),
        snapshot_events=rng.choice([10, 40, 50_000]),
        retention_hours=rng.choice([0, 168]),
        same_ports=rng.random() < 0.5,
        neighbours=rng.random() < 0.4,
    )
    modes = random.Random(f"mode {seed}")
    drawn = modes.choice(OLD_MODES)  # of its own as well
    in_order = random.Random(f"ordered {seed}")
    if in_order.random() < ORDERED:
        drawn = "ordered"
    by_claims = random.Random(f"claimed {seed}")
    if drawn != "ordered" and by_claims.random() < CLAIMED:
        drawn = "claimed"
    _have_read(scenario, mode or drawn, modes)
    share = (0.1, 0.2, 0.35)[seed % 3]
    chances = random.Random(f"later {seed}")
    if chances.random() < 0.15 and not scenario.steps:
        scenario.leaves = chances.choice([0.02, 0.2, 1])
        scenario.named, scenario.epochs = True, chances.randint(3, 6)
    spot = random.Random(f"preempted {seed}")
    # Of what has no end, a trainer wants so much in one life, and might never come to it.
    ends = not scenario.pipeline.endless
    if spot.random() < 0.4 and scenario.mode in ("shared", "save") and ends:
        scenario.preempted = spot.choice([0.01, 0.05, 0.3])
        scenario.named, scenario.trainers = True, spot.randint(1, 3)
    scenario.rejects = random.Random(f"rejects {seed}").random() < 0.3
    functions = random.Random(f"python {seed}")
    if functions.random() < 0.3 and scenario.mode == "shared" and not only:
        scenario.pipeline = replace(
            scenario.pipeline, python=True, providers=1, passes=1, endless=False
        )
    parking = random.Random(f"parking {seed}")
    if scenario.mode == "shared" and scenario.policy is ShardingPolicy.DYNAMIC:
        scenario.kept_pipelines = parking.choice([0, 0, 1, 4])
        scenario.expected_s = parking.choice([0, 0.5, 2])
        scenario.memory_budget = parking.choice([2_000, 50_000, 1 << 30, 1 << 30])
    tidy = random.Random(f"tidy {seed}")
    if tidy.random() < 0.3 and not scenario.steps:
        scenario.finished_retention_ms = tidy.choice([0, 1_000])
        scenario.unused_retention_s = tidy.choice([-1, -1, 3])
        if tidy.random() < 0.5:
            moments = [scenario.work_s * tidy.uniform(0, 2) for _ in range(tidy.randint(1, 6))]
            scenario.removals = [(at_s, tidy.random() < 0.5) for at_s in sorted(moments)]
    if scenario.mode == "ordered":
        _have_read_in_order(scenario, in_order)
        _have_steps_left_out(scenario, random.Random(f"skips 40 {seed}"))
        _have_sources_mixed(scenario, random.Random(f"mixture 15 {seed}"))
    if scenario.mode == "claimed":
        _have_claimed(scenario, by_claims)
    kinds = [k for k in FAULTS if (chances if k in LATER else rng).random() < share]
    if kinds := list(only) or kinds:
        span = 1.2 * scenario.work_s + 0.5
        scenario.faults = sorted(
            (
                Fault(
                    kind=rng.choice(kinds),
                    at_s=span * rng.random() ** 1.5,
                    for_s=10 ** rng.uniform(-1.5, 1),
                    steps=rng.choice([0, rng.randrange(30)]),
                )
                for _ in range(rng.randint(1, 12))
            ),
            key=lambda fault: fault.at_s,
        )
        longer = random.Random(f"longer {seed}")
        for fault in scenario.faults:
            if fault.kind == "freeze worker":
                # For long enough that it is given up; some for so long that readers let it go.
                scenario.worker_timeout_ms = min(scenario.worker_timeout_ms, 20_000)
                fault.for_s = scenario.worker_timeout_ms / 1000 + chances.uniform(
                    0.5, DEAD_IF_SILENT_S / 2
                )
                if longer.random() < 0.25:
                    fault.for_s += DEAD_IF_SILENT_S
    return scenario


def _have_read(scenario: Scenario, mode: str, rng: random.Random) -> None:
    """Have it read in a mode."""
    scenario.mode = mode
    pipeline = scenario.pipeline
    if mode in ("rounds", "cached"):
        scenario.named, scenario.epochs = True, 1
        scenario.pipeline = replace(pipeline, endless=True, passes=1)
        scenario.steps = min(pipeline.splits, 150)
        scenario.policy = rng.choice([ShardingPolicy.OFF, ShardingPolicy.DYNAMIC])
    match mode:
        case "rounds":
            scenario.trainers = rng.randint(1, 3)
            scenario.together = rng.random() < 0.3
        case "cached":
            scenario.cache_bytes = rng.choice([2_000, 20_000, 1 << 30])
            scenario.pairs = rng.random() < 0.3
        case "static":
            scenario.pipeline = replace(pipeline, endless=False)
            scenario.policy = rng.choice([ShardingPolicy.FILE, ShardingPolicy.DATA])
            scenario.any_port = rng.random() < 0.5
            scenario.spare = scenario.any_port and scenario.workers > 1 and rng.random() < 0.4
        case "save":
            scenario.chunk_bytes = rng.choice([1, 400, 4_000, 1 << 30])
            scenario.saved_splits = int(10 ** rng.uniform(0.5, 2.3))


def _have_read_in_order(scenario: Scenario, rng: random.Random) -> None:
    pipeline = scenario.pipeline = replace(
        scenario.pipeline, splits=int(10 ** rng.uniform(0, 1.7)), providers=1, passes=1,
        endless=False, python=False, uneven=rng.choice([0, rng.randint(1, 1 << 30)]),
    )  # fmt: skip
    scenario.policy, scenario.leaves = ShardingPolicy.OFF, 0
    scenario.epochs = rng.choice([1, 2, 2, 3])
    scenario.trainers = 3
    scenario.together = rng.random() < 0.4
    scenario.memory_budget = rng.choice([2_000, 50_000, 1 << 30])
    total = sum(map(pipeline.kept, range(pipeline.splits)))
    step = rng.choice([0, 6, 6, 12, 24, 8, 9, 7])
    start = rng.choice([0, 0, rng.randrange(max(1, total * scenario.epochs))])
    scenario.asked = Asked(
        seed=rng.randrange(1 << 40),
        shuffle=rng.random() < 0.7,
        cycle_length=rng.choice([1, 2, 3, 5, 16]),
        block_length=rng.choice([1, 1, 1, 2, 5]),
        bundle_splits=rng.choice([0, 1, 2, 5]),
        step=step,
        drop_remainder=step > 0 and rng.random() < 0.4,
        start=start,
        by_steps=rng.random() < 0.5,
        consumers=rng.choice([of for of in (1, 2, 3) if not step % of]),
        window_bytes=rng.choice([200, 2_000, 64 << 20]),
        first_window=rng.choice([1, 16, 256]),
        portion_bytes=rng.choice([40, 400, 1 << 20]),
        large_bytes=rng.choice([40, 32 << 10]),
        ahead=rng.choice([1, 3, 16]),
        ahead_bytes=rng.choice([100, 1_000, 4 << 20]),
    )


def _have_steps_left_out(scenario: Scenario, rng: random.Random, chance: float = 0.4) -> None:
    assert scenario.asked is not None
    if rng.random() < chance:
        scenario.named, scenario.asked = True, replace(scenario.asked, by_steps=False)
        scenario.pipeline = replace(scenario.pipeline, splits=scenario.pipeline.splits + 20)
        scenario.epochs, scenario.step_s = rng.randint(2, 4), rng.choice([1e-3, 2e-2])
        scenario.together = rng.random() < 0.7
        end = scenario.epochs * sum(map(scenario.pipeline.kept, range(scenario.pipeline.splits)))
        scenario.skips = sorted(rng.randint(0, end) for _ in range(rng.randint(1, 8)))


def _have_sources_mixed(scenario: Scenario, rng: random.Random) -> None:
    weights = [rng.choice([0, 1, 1, 3, 20, 0.01]) for _ in range(rng.randint(2, 3))]
    has_elements = any(map(scenario.pipeline.kept, range(scenario.pipeline.splits)))
    if rng.random() < 0.4 and has_elements and any(weights):
        if not scenario.skips:
            _have_steps_left_out(scenario, rng)
        scenario.pipeline = replace(scenario.pipeline, shares=shares(weights))
        scenario.removals.clear()


def _have_claimed(scenario: Scenario, rng: random.Random) -> None:
    _have_read_in_order(scenario, rng)
    scenario.trainers = rng.randint(1, 3)
    scenario.named = rng.random() < 0.85
    if scenario.named:
        scenario.leaves = rng.choice([0, 0, 0.02, 0.2])
