"""All commands of the state machine, in one place; each topic describes its own."""
# mypy: implicit-reexport
# ruff: noqa: F401

from .base import Command
from .checksums import CheckBundles
from .claims import ClaimBundles
from .consumers import EjectConsumers, JoinIteration, LeaveIteration
from .datasets import DecideCompression, ForgetBlob, RegisterDataset, RemoveDataset
from .iterations import CollectIteration
from .jobs import GetOrCreateJob, JoinJob, RemoveJob
from .lengths import CountBundles, DeclareLengths, LearnLengths
from .ordered import MoveConsumers
from .rounds import RemoveTask, ReportRound
from .save_streams import AssignSplit, AssignStream, CommitChunk, CompleteStream
from .saves import FailSave, StartSave
from .schedules import ChangeSchedule
from .skips import SkipSplit
from .splits import FindSplits, GetSplit, LeaseSplits
from .tasks import CompleteTask
from .terms import ElectLeader
from .workers import LoseWorker, RegisterWorker
