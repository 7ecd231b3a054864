"""What a worker tells of its host's load, by files as Linux has them in /proc."""

from __future__ import annotations

from pathlib import Path

from forebay.service.worker.host import HostWatch

MEMORY = "MemTotal: 8000 kB\nMemFree: 100 kB\nMemAvailable: 6000 kB\nHugePages_Total: 0\n"


def test_the_share_of_the_time_since_the_last_look_and_the_memory(tmp_path: Path) -> None:
    def spend(user: int, idle: int, waits_for_disk: int = 0) -> None:
        line = f"cpu  {user} 0 0 {idle} {waits_for_disk} 0 0 0 0 0\ncpu0 1 1 1 1\n"
        (tmp_path / "stat").write_text(line)

    (tmp_path / "meminfo").write_text(MEMORY)
    spend(user=1000, idle=1000)
    watch = HostWatch(tmp_path)
    spend(user=1150, idle=1025, waits_for_disk=25)
    load = watch.load()
    assert load is not None and load.busy_permille == 750
    assert (load.memory_bytes, load.memory_used_bytes) == (8_192_000, 2_048_000)
    spend(user=1151, idle=1025, waits_for_disk=25)  # too short a time for a share
    assert watch.load() == load
    (tmp_path / "meminfo").write_text("MemTotal: 8000 kB\n")
    assert watch.load() is None
    assert HostWatch(tmp_path / "nothing").load() is None
