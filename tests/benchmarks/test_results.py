"""What is made of figures: ratios, requirements, several readers as one."""

from __future__ import annotations

import pytest

from forebay.benchmarks.results import Reading, Result, compared, together


def result(less: bool, ours: list[float], peer: list[float], **required: float) -> Result:
    return Result(
        row="row", what="what", unit="things/s", less=less, ours=ours, peer=peer, **required
    )


def reading(elements: float, seconds: float) -> Reading:
    return Reading(
        elements=elements,
        seconds=seconds,
        client_cpu_s=1.0,
        worker_cpu_s=2.0,
        client_peak_mb=100.0,
        worker_peak_mb=300.0,
        first_s=seconds / 10,
    )


def test_ratios_say_how_many_times_better_ours_is() -> None:
    assert result(False, ours=[10, 30], peer=[5, 10]).ratios() == [2, 3]
    assert result(True, ours=[10, 5], peer=[5, 10]).ratios() == [0.5, 2]
    assert result(False, ours=[10], peer=[]).ratios() == []


@pytest.mark.parametrize(("less", "ours", "peer"), [(False, 3, 0), (True, 0, 3)])
def test_there_is_no_ratio_to_nothing(less: bool, ours: float, peer: float) -> None:
    one = result(less, ours=[ours], peer=[peer], required=3)
    assert (one.ratios(), one.met()) == ([], True)
    assert one.as_json()["median"] == {"peer": peer, "forebay": ours, "ratio": None}
    assert not result(less, ours=[ours], peer=[peer], required_ratio=1).met()


@pytest.mark.parametrize(
    ("less", "ours", "peer", "required", "met", "words"),
    [
        (False, [3, 9, 1], [1, 1, 1], {"required_ratio": 3}, True, "≥ 3 ×"),
        (False, [2, 9, 1], [1, 1, 1], {"required_ratio": 3}, False, "≥ 3 ×"),
        (True, [4], [2], {"required_ratio": 1}, False, "≥ 1 ×"),
        (False, [4000], [], {"required": 4000}, True, "≥ 4,000 things/s"),
        (True, [4], [], {"required": 3}, False, "≤ 3 things/s"),
        (True, [4], [1], {}, True, ""),
    ],
)
def test_medians_have_to_meet_what_is_required(
    less: bool,
    ours: list[float],
    peer: list[float],
    required: dict[str, float],
    met: bool,
    words: str,
) -> None:
    one = result(less, ours, peer, **required)
    assert one.met() is met
    assert one.requirement() == words
    assert one.as_json()["met"] is met


def test_rates_of_several_readers_add_up() -> None:
    one, other = reading(100, 1.0), reading(300, 2.0)
    both = together([one, other])
    assert both.elements_per_s == pytest.approx(100 + 150)
    assert (both.client_cpu_s, both.worker_cpu_s) == (2.0, 2.0)  # of two readers, of one worker
    assert (both.client_peak_mb, both.worker_peak_mb) == (200.0, 300.0)
    assert both.first_s == 0.2


def test_processor_time_is_compared_round_by_round() -> None:
    """A reading has 3 s of processor time."""
    ours, peer = [reading(100, 1.0), reading(50, 1.0)], [reading(150, 1.0), reading(150, 1.0)]
    found = compared("row", "what", "cpu_us", ours, peer, least=0.5)
    assert found.ours == pytest.approx([30_000, 60_000])
    assert found.ratios() == pytest.approx([2 / 3, 1 / 3])
    assert found.met()
    assert not compared("row", "what", "elements_per_s", ours, peer, least=0.6).met()
