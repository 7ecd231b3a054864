"""The order in which the sides take turns."""

from __future__ import annotations

from pathlib import Path

from forebay.benchmarks.setting import Setting


def test_every_other_round_begins_at_the_other_end(tmp_path: Path) -> None:
    setting = Setting(rounds=3, quick=True, path=tmp_path, seconds=0.1, warm_up_s=0.1)
    turns: list[str] = []

    def side(name: str) -> int:
        turns.append(name)
        return len(turns)

    figures = setting.alternate(peer=lambda: side("peer"), ours=lambda: side("ours"))
    assert turns == ["peer", "ours", "ours", "peer", "peer", "ours"]
    assert figures == {"peer": [1, 4, 5], "ours": [2, 3, 6]}
    assert len(setting.calibrations_ms) == 3
