"""Delivery policies: which subscription gets which of a task's blocks (base.py: the contract)."""

from __future__ import annotations

from .base import End as End
from .base import EndOfSlice as EndOfSlice
from .base import EndOfTask as EndOfTask
from .base import EndPending as EndPending
from .base import Listener as Listener
from .base import OutputCancelled as OutputCancelled
from .base import OutputReset as OutputReset
from .base import Subscription as Subscription
from .base import Superseded as Superseded
from .base import TaskFailed as TaskFailed
from .base import TaskOutput as TaskOutput
from .base import TaskUnknown as TaskUnknown
from .bundles import BundleRun as BundleRun
from .bundles import BundlesOutput as BundlesOutput
from .cached import MAX_TRAINERS as MAX_TRAINERS
from .cached import CachedOutput as CachedOutput
from .cached import Skips as Skips
from .first_come import FirstComeOutput as FirstComeOutput
from .memory import MemoryBudget as MemoryBudget
from .read_requests import ANY as ANY
from .read_requests import AnyBlock as AnyBlock
from .read_requests import Cached as Cached
from .read_requests import ReadRequest as ReadRequest
from .read_requests import Rounds as Rounds
from .read_requests import Slice as Slice
from .rounds import RoundsOutput as RoundsOutput
