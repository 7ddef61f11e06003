"""How tests are shared out among the workers of pytest-xdist."""

from __future__ import annotations

from collections import Counter

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling


class UnitScheduling(LoadGroupScheduling):
    """Tests without a group go to the workers in units of neighbours: each message to a worker takes milliseconds."""

    SIZE = 8

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # the order is that of turn() in conftest.py
        self._units: dict[str, str] = {}

    def schedule(self) -> None:
        if self.collection is None:
            counts: Counter[str] = Counter()
            for nodeid in next(iter(self.registered_collections.values())):
                path = nodeid.split("::", 1)[0]
                self._units[nodeid] = f"{path} {counts[path] // self.SIZE}"
                counts[path] += 1
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        group = super()._split_scope(nodeid)
        return self._units[nodeid] if group == nodeid else group
