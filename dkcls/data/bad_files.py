"""The files that could not be read: named, counted, logged once each."""

import logging
from collections.abc import Iterable
from typing import Any

from dkcls.data.base import BadFile

log = logging.getLogger(__name__)


class BadFiles:
    """Kept in the main process; the workers send what they find along with the batch.

    `share` is of the images that this rank reads in an epoch, the most in any epoch so far: so it means the same for any
    number of ranks, and does not grow as a rank meets the same bad files in the parts of others.
    """

    def __init__(self, images_per_epoch: int, limit: float, notes: Iterable[str] = ()):
        if not 0 <= limit <= 1:
            raise ValueError(f"bad_limit must be a share from 0 to 1, got {limit}")
        self.limit, self._images_per_epoch = limit, max(images_per_epoch, 1)
        self._messages: dict[int, str] = {}
        self._notes = list(notes)
        self._in_epoch: set[int] = set()
        self._most = 0
        for note in self._notes:
            log.warning("%s", note)

    @property
    def names(self) -> list[str]:
        """One "path: reason" each, by their place in the data set; first what is wrong with the set as a whole."""
        return [*self._notes, *(self._messages[index] for index in sorted(self._messages))]

    @property
    def count(self) -> int:
        return len(self._notes) + len(self._messages)

    @property
    def share(self) -> float:
        return self._most / self._images_per_epoch

    @property
    def exceeded(self) -> bool:
        return self.share > self.limit

    def start_epoch(self) -> None:
        self._in_epoch.clear()

    def add(self, bad: Iterable[BadFile]) -> None:
        for index, message in bad:
            if index not in self._messages:
                log.warning("bad file %s", message)
                self._messages[index] = message
            self._in_epoch.add(index)
        self._most = max(self._most, len(self._in_epoch))

    def state(self) -> dict[str, Any]:
        """For a checkpoint: a run that goes on in the middle of an epoch does not meet its first files again."""
        return {"messages": self._messages, "in_epoch": sorted(self._in_epoch), "most": self._most}

    def load_state(self, state: dict[str, Any]) -> None:
        self._messages, self._in_epoch, self._most = (
            dict(state["messages"]),
            set(state["in_epoch"]),
            state["most"],
        )
