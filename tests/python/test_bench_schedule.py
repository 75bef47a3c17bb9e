"""When a cell is measured, for how long, and when it is finished; by a clock that only the test moves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.bench import launches, schedule
from unisono.bench.progress import PLAIN_EVERY_S, Display
from unisono.bench.schedule import Cell, Limits, Schedule
from unisono.records import stats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def simulate(
    costs: list[float], limits: Limits, spread: float = 0.01, seed: int = 1, calls: int = 1
) -> tuple[Schedule, Clock, list[list[int]]]:
    """Runs cells whose calls take `costs` seconds, with a relative noise, to the end."""
    clock, noise = Clock(), random.Random(seed)
    plan = Schedule([Cell(calls) for _ in costs], limits, seed, clock)
    orders = []
    while order := plan.order():
        orders.append(order)
        for index in order:
            if plan.cells[index].call_s == 0.0:
                clock.now += costs[index]
                plan.know(index, costs[index])
            batch = plan.batch(index)
            began = clock.now
            times = [costs[index] * (1 + spread * noise.random()) for _ in range(batch.samples)]
            clock.now += sum(times) * batch.calls + costs[index] * batch.warmup
            plan.add(index, [t * 1e6 for t in times], [0.0] * len(times), clock.now - began)
    return plan, clock, orders


def test_steady_cells_stop_after_the_fewest_rounds() -> None:
    plan, _, orders = simulate([1e-5] * 20, Limits(budget_s=60))
    assert len(orders) == schedule.MIN_ROUNDS
    assert all(cell.converged and cell.rounds == schedule.MIN_ROUNDS for cell in plan.cells)
    assert all(stats.quantiles(cell.samples_us)[0.99] is not None for cell in plan.cells)


def test_noisy_cells_get_more_samples_but_not_for_ever() -> None:
    limits = Limits(budget_s=60, max_samples=700)
    plan, clock, _ = simulate([1e-5] * 5, limits, spread=20.0)
    assert all(len(cell.samples_us) > 450 for cell in plan.cells)
    assert all(len(cell.samples_us) <= limits.max_samples for cell in plan.cells)
    assert clock.now - 100.0 < limits.budget_s


def test_the_budget_holds_and_every_cell_still_gets_an_interval() -> None:
    costs = [10 ** random.Random(i).uniform(-5, -0.7) for i in range(60)]
    plan, clock, _ = simulate(costs, Limits(budget_s=120), spread=5.0)
    assert clock.now - 100.0 <= 120 * 1.25
    assert all(len(cell.samples_us) >= stats.MIN_SAMPLES for cell in plan.cells)


def test_far_too_little_time_still_gives_every_cell_six_samples() -> None:
    plan, _, _ = simulate([0.5] * 10, Limits(budget_s=1))
    assert all(len(cell.samples_us) == stats.MIN_SAMPLES for cell in plan.cells)


def test_calls_that_take_long_are_spread_over_visits() -> None:
    plan, clock, _ = simulate([0.5] * 4, Limits(budget_s=30))
    assert all(cell.rounds >= schedule.MIN_ROUNDS for cell in plan.cells)
    assert clock.now - 100.0 <= 30 * 1.25


def test_a_launch_of_many_spreads_its_samples_over_more_rounds() -> None:
    whole = Limits(budget_s=600)
    plan, _, orders = simulate([1e-5] * 20, launches.share_of(whole, 12), spread=20.0)
    assert len(orders) >= 2 * whole.rounds
    assert all(max(cell.visits) <= 20 for cell in plan.cells)
    assert launches.share_of(whole, 1) == whole
    assert launches.share_of(Limits(budget_s=600, max_samples=50), 12).max_samples == 50


def test_few_visits_do_not_converge_however_narrow() -> None:
    plan, _, _ = simulate([0.5] * 10, Limits(budget_s=1))
    assert all(cell.rounds < schedule.MIN_ROUNDS and not cell.converged for cell in plan.cells)


@pytest.mark.parametrize("samples", [6, 9, 10, 11, 100])
def test_a_fixed_number_of_samples_is_spread_over_visits(samples: int) -> None:
    plan, _, _ = simulate([1e-4], Limits(budget_s=1, samples=samples))
    assert plan.cells[0].rounds >= schedule.MIN_ROUNDS


def test_quick_cells_leave_their_time_to_slow_ones() -> None:
    plan, _, _ = simulate([1e-5] * 50 + [0.1], Limits(budget_s=30), spread=3.0)
    assert len(plan.cells[-1].samples_us) > 30 / 51 / 0.1 * 2


@settings(max_examples=50)
@given(st.lists(st.floats(1e-6, 0.2), min_size=1, max_size=12), st.integers(1, 60), st.floats(0, 10))
def test_a_fixed_number_of_samples_is_kept_exactly(costs: list[float], samples: int, spread: float) -> None:
    plan, _, _ = simulate(costs, Limits(budget_s=1, samples=samples), spread)
    assert [len(cell.samples_us) for cell in plan.cells] == [samples] * len(costs)


def test_every_round_has_a_fresh_random_order_from_the_seed() -> None:
    limits = Limits(budget_s=60, samples=50)
    orders = [simulate([1e-4] * 12, limits, seed=seed)[2] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(12)) for order in orders[0])
    assert len({tuple(order) for order in orders[0]}) == len(orders[0])


def test_rivals_are_measured_one_after_the_other_and_equally_often() -> None:
    clock, noise = Clock(), random.Random(5)
    plan = Schedule([Cell(case=index // 2) for index in range(8)], Limits(budget_s=60), 1, clock)
    turns = set()
    while order := plan.order():
        assert [a // 2 for a in order[::2]] == [b // 2 for b in order[1::2]]
        turns |= {(first // 2, first % 2) for first in order[::2]}
        for index in order:
            plan.know(index, 1e-4)
            batch, spread = plan.batch(index), 3.0 if index == 0 else 0.001  # one cell needs more rounds
            samples = [100.0 + 100.0 * spread * noise.random() for _ in range(batch.samples)]
            clock.now += sum(samples) / 1e6
            plan.add(index, samples, [0.0] * len(samples), sum(samples) / 1e6)
    rounds = [cell.rounds for cell in plan.cells]
    assert rounds[0] == rounds[1] > rounds[2]
    assert rounds[2:] == [schedule.MIN_ROUNDS] * 6
    assert len(turns) > 4  # no cell is always the first of its case


def test_an_outclassed_rival_is_not_visited_again() -> None:
    plan = Schedule([Cell(case=i // 3) for i in range(6)], Limits(60, outclassed=1.5), 1, Clock())
    costs = [10.0, 14.0, 16.0, 40.0, 39.0, 10.0]
    for _ in range(schedule.MIN_ROUNDS):
        for index in plan.order():
            plan.know(index, costs[index] * 1e-6)
            count = plan.batch(index).samples
            plan.add(index, [costs[index]] * count, [0.0] * count, 1e-3)
    assert [cell.rounds for cell in plan.cells] == [6, 6, 1, 1, 1, 6]
    assert plan.order() == []


def test_a_dropped_rival_is_not_waited_for() -> None:
    plan = Schedule([Cell(case="a"), Cell(case="a")], Limits(budget_s=10, max_samples=6), 1, Clock())
    plan.order()
    plan.know(0, 1.0)
    plan.add(0, [1.0] * 6, [0.0] * 6, 6.0)
    assert not plan.cells[1].done
    plan.drop(1)
    assert plan.order() == []


def test_the_time_of_a_sample_is_that_of_its_queue() -> None:
    one, queue = (simulate([0.01], Limits(budget_s=10), spread=3.0, calls=calls) for calls in (1, 20))
    assert len(queue[0].cells[0].samples_us) < len(one[0].cells[0].samples_us)
    assert queue[1].now - 100.0 <= 10 * 1.25


def test_warm_up_is_bounded_in_time_and_never_left_out() -> None:
    def warmup(call_s: float, limits: Limits) -> int:
        plan = Schedule([Cell()], limits, 1, Clock())
        plan.order()
        plan.know(0, call_s)
        return plan.batch(0).warmup

    assert warmup(1e-6, Limits(budget_s=10, warmup=7)) == 7
    assert warmup(1.0, Limits(budget_s=10, warmup=7)) == 1
    assert warmup(1e-6, Limits(budget_s=10, warmup=0)) == 1


def test_a_dropped_cell_is_not_visited_again() -> None:
    clock = Clock()
    plan = Schedule([Cell() for _ in range(3)], Limits(budget_s=10), 1, clock)
    plan.order()
    plan.drop(1)
    assert sorted(plan.order()) == [0, 2]


def test_the_progress_ends_at_one_and_the_time_left_at_zero() -> None:
    plan, clock, _ = simulate([1e-4] * 4, Limits(budget_s=20))
    assert plan.share_done() == 1.0
    assert plan.estimate_s() == 0.0
    fresh = Schedule([Cell()], Limits(budget_s=20), 1, clock)
    assert fresh.share_done() == 0.0
    left = fresh.estimate_s()
    assert left is not None and 0 < left <= 20.0


def test_the_time_left_holds_the_second_checks_and_is_none_past_the_budget() -> None:
    clock = Clock()
    plan = Schedule([Cell()], Limits(budget_s=20), 1, clock)
    plan.order()
    plan.reserve_s = 8.0
    plan.know(0, 1.0)
    assert plan.estimate_s() == 20.0  # 12 s for samples, the rest for the checks
    clock.now += 12.0
    assert plan.estimate_s() is None


def test_the_progress_promises_no_time_past_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    plan, display = Schedule([Cell()], Limits(budget_s=75), 1, clock), Display(None)
    plan.order()
    plan.know(0, 1.0)
    for _ in range(2):
        display._last -= PLAIN_EVERY_S
        display.show(plan, "barrier 0 B on mpi")
        clock.now += 75.0
    first, second = capsys.readouterr().out.splitlines()
    assert first.strip() == "0% of the cells are done, about 1:15 left, now barrier 0 B on mpi"
    assert second.strip() == "0% of the cells are done, the budget is used up, now barrier 0 B on mpi"
