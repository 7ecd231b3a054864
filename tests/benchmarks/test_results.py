"""What is made of figures: ratios, requirements, several readers as one."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.benchmarks.results import Better, Costs, Feeding, Reading, Result, together


def result(better: Better, ours: list[float], peer: list[float], **required: float) -> Result:
    return Result(
        row="row", what="what", unit="things/s", better=better, ours=ours, peer=peer, **required
    )


def reading(elements: float, seconds: float) -> Reading:
    return Reading(
        elements=elements,
        bytes=elements * 1e6,
        seconds=seconds,
        client_cpu_s=1.0,
        worker_cpu_s=2.0,
        client_peak_mb=100.0,
        worker_peak_mb=300.0,
        first_s=seconds / 10,
        ended=seconds > 1,
    )


def test_ratios_say_how_many_times_better_ours_is() -> None:
    assert result(Better.MORE, ours=[10, 30], peer=[5, 10]).ratios() == [2, 3]
    assert result(Better.LESS, ours=[10, 5], peer=[5, 10]).ratios() == [0.5, 2]
    assert result(Better.MORE, ours=[10], peer=[]).ratios() == []


@pytest.mark.parametrize(("better", "ours", "peer"), [(Better.MORE, 3, 0), (Better.LESS, 0, 3)])
def test_there_is_no_ratio_to_nothing(better: Better, ours: float, peer: float) -> None:
    one = result(better, ours=[ours], peer=[peer], required=3)
    assert (one.ratios(), one.met()) == ([], True)
    assert one.as_json()["median"] == {"peer": peer, "forebay": ours, "ratio": None}
    assert not result(better, ours=[ours], peer=[peer], required_ratio=1).met()


@pytest.mark.parametrize(
    ("better", "ours", "peer", "required", "met", "words"),
    [
        (Better.MORE, [3, 9, 1], [1, 1, 1], {"required_ratio": 3}, True, "≥ 3 ×"),
        (Better.MORE, [2, 9, 1], [1, 1, 1], {"required_ratio": 3}, False, "≥ 3 ×"),
        (Better.LESS, [4], [2], {"required_ratio": 1}, False, "≥ 1 ×"),
        (Better.MORE, [4000], [], {"required": 4000}, True, "≥ 4,000 things/s"),
        (Better.LESS, [4], [], {"required": 3}, False, "≤ 3 things/s"),
        (Better.LESS, [4], [1], {}, True, ""),
    ],
)
def test_medians_have_to_meet_what_is_required(
    better: Better,
    ours: list[float],
    peer: list[float],
    required: dict[str, float],
    met: bool,
    words: str,
) -> None:
    one = result(better, ours, peer, **required)
    assert one.met() is met
    assert one.requirement() == words
    assert one.as_json()["met"] is met


def test_rates_of_several_readers_add_up() -> None:
    one, other = reading(100, 1.0), reading(300, 2.0)
    both = together([one, other])
    assert both.elements_per_s == pytest.approx(100 + 150)
    assert both.mb_per_s == pytest.approx(250)
    assert (both.client_cpu_s, both.worker_cpu_s) == (2.0, 2.0)  # of two readers, of one worker
    assert (both.client_peak_mb, both.worker_peak_mb) == (200.0, 300.0)
    assert both.first_s == 0.2
    assert not both.ended


def test_costs_are_per_gigabyte_and_in_medians() -> None:
    costs = Costs(row="row", what="what", side="Forebay", readings=[reading(500, 1.0)])
    assert costs.as_json()["median"] == {
        "elements_per_s": 500,
        "mb_per_s": 500,
        "worker_cpu_s_per_gb": 4,
        "client_cpu_s_per_gb": 2,
        "worker_peak_mb": 300,
        "client_peak_mb": 100,
    }


def test_processor_time_is_compared_with_that_of_the_pipeline_round_by_round() -> None:
    """A reading has 3 s of processor time."""
    feeding = Feeding(
        row="row", what="what", way="read",
        readings=[reading(100, 1.0), reading(50, 1.0)],
        bare=[reading(150, 1.0), reading(150, 1.0)],
        beside="another", others=[reading(50, 1.0), reading(50, 1.0)], at_most=0.75,
    )  # fmt: skip
    assert feeding.ratios() == pytest.approx([1.5, 3])
    assert feeding.figures()["cpu_us_per_element"] == pytest.approx([30_000, 60_000])
    assert feeding.excess() == pytest.approx(0.75)  # the median of 0.5 and 1
    assert feeding.met()
    record = feeding.as_json()
    assert (record["median"]["cpu_over_bare"], record["met"]) == (pytest.approx(2.25), True)
    assert record["required"] == [{"what": "≤ 0.75 × another", "found": 0.75, "met": True}]


def test_processor_time_above_what_is_required_is_not_met() -> None:
    one, other = [reading(100, 1.0)], [reading(150, 1.0)]
    how: dict[str, Any] = {
        "row": "row",
        "what": "what",
        "way": "read",
        "readings": one,
        "bare": other,
    }
    assert not Feeding(**how, beside="it", others=other, at_most=1.4).met()
    unbounded = Feeding(**how)
    assert unbounded.met() and not list(unbounded.requirements())


@pytest.mark.parametrize(("least", "met"), [(0.6, True), (0.7, False)])
def test_rates_are_compared_with_others(least: float, met: bool) -> None:
    one, other = [reading(100, 1.0)], [reading(150, 1.0)]
    feeding = Feeding(
        row="row", what="what", way="read", readings=one, bare=one, at_least={"it": (least, other)}
    )
    assert feeding.met() is met
    ((what, found, is_met),) = feeding.requirements()
    assert (what, is_met) == (f"≥ {least:g} × the rate of it", met)
    assert found == pytest.approx(2 / 3)
