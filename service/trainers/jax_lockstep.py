"""Messages between the processes of a JAX training, so that all of them take the same steps.

They use the key-value store of `jax.distributed`'s coordinator. A collective operation of the
devices would not do: every process would have to run it at the same place among the training's own
steps, or both would hang.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from urllib.parse import quote

import jax

from ..errors import FailedPrecondition, Unavailable

_numbers: dict[str, itertools.count[int]] = collections.defaultdict(itertools.count)


class Exchange:
    """Rounds in which each of these processes sends a text and receives everybody's.

    Exchanges of one `name` are numbered in their order, which must be the same in all processes.
    """

    def __init__(self, name: str, processes: Sequence[int], timeout_s: float) -> None:
        """Raises FailedPrecondition if there is no coordinator."""
        # JAX has no public name for this.
        self._client = jax._src.distributed.global_state.client
        if self._client is None:
            raise FailedPrecondition(
                f"the mesh has devices of processes {[*processes]}, which have no coordinator: "
                "call jax.distributed.initialize() in each before anything else"
            )
        # Quoted, so that no exchange's keys lie below another's, and are deleted with them.
        self._key = f"forebay/{quote(name, safe='')}/{next(_numbers[name])}"
        self.processes = [*processes]
        self._timeout_s = timeout_s
        self._exchanges = itertools.count()

    def exchange(self, mine: str) -> list[str]:
        """Send `mine`; return the texts of all processes in this exchange, in their order.

        Waits for all of them. Raises Unavailable if one of them does not come within `timeout_s`.
        """
        number = next(self._exchanges)
        me = jax.process_index()
        key = f"{self._key}/{number}"
        try:
            self._client.key_value_set(f"{key}/{me}", mine)
            self._client.wait_at_barrier(key, int(1000 * self._timeout_s), self.processes)
            said = dict(self._client.key_value_dir_get(f"{key}/"))
            if number and me == self.processes[0]:  # all have passed it
                self._client.key_value_delete(f"{self._key}/{number - 1}/")
        except jax.errors.JaxRuntimeError as error:
            raise Unavailable(
                f"processes {self.processes} have not all come to their next batch in "
                f"{self._timeout_s:g} s: see whether one of them has ended, waits for its data, "
                f"or has taken another number of steps ({error})"
            ) from error
        return [said[f"{key}/{process}"] for process in self.processes]
