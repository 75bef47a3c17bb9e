"""Sizes, grids, layouts and bus-bandwidth factors."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.bench import cases
from unisono.bench.cases import CaseError, grid, layout, make_case
from unisono.records import vocabulary
from unisono.records.vocabulary import bus_factor

names = st.sampled_from(list(vocabulary.COLLECTIVES))
dtypes = st.sampled_from(list(vocabulary.DTYPES))


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("64K", 65536), ("1m", 1 << 20), ("2G", 2 << 30), (" 4KiB ", 4096), ("3MB", 3 << 20)],
)
def test_sizes(text: str, size: int) -> None:
    assert cases.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-8", "1.5M", "8T", "8 8", "0x10"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(CaseError, match="not understood"):
        cases.parse_size(text)


def test_no_size_is_0() -> None:
    with pytest.raises(CaseError, match="at least 1 byte"):
        cases.parse_size("0K")


def test_sizes_below_an_element_are_named() -> None:
    sentence = cases.too_few([3, 4, 8], ["u8", "f32", "f64"])
    assert sentence is not None and sentence.startswith(
        "3 B of f32, 3 B of f64, 4 B of f64: less than an element"
    )
    assert cases.too_few([8], list(vocabulary.DTYPES)) is None


def test_ranges() -> None:
    assert cases.size_range(8, 64, 2) == [8, 16, 32, 64]
    assert cases.size_range(8, 100, 8) == [8, 64]
    assert cases.size_range(8, 8, 1) == [8]
    assert cases.size_range(8, 100, step=40) == [8, 48, 88]
    with pytest.raises(CaseError, match="at least 1"):
        cases.size_range(8, 100, step=0)
    for begin, end, factor in ((0, 8, 2), (16, 8, 2), (8, 16, 1)):
        with pytest.raises(CaseError):
            cases.size_range(begin, end, factor)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(CaseError, match=r"all_reduce, reduce, .*barrier"):
        cases.split_names("collective", "all_reduce,allreduce", list(vocabulary.COLLECTIVES))
    with pytest.raises(CaseError, match="f32"):
        make_case("all_reduce", 8, "float32", 2)
    with pytest.raises(CaseError, match="sum, prod"):
        make_case("all_reduce", 8, "f32", 2, op="mean")
    assert cases.split_names("op", "max, sum,max", vocabulary.OPS) == ["max", "sum"]
    assert cases.split_names("op", "all", vocabulary.OPS) == list(vocabulary.OPS)


def test_bitwise_ops_are_of_integers_on_cpus() -> None:
    kinds = {(c.dtype, c.op) for c in grid(2, ["all_reduce"], [64], ["f32", "i32"], ["sum", "bxor"])}
    assert kinds == {("f32", "sum"), ("i32", "sum"), ("i32", "bxor")}
    on_gpu = grid(2, ["all_reduce"], [64], ["i32"], ["sum", "bor"], modes=["graph"], device="cuda")
    assert [case.op for case in on_gpu] == ["sum"]
    with pytest.raises(CaseError, match="no bxor of f32 on cpu: choose another --op or --dtype"):
        grid(2, ["all_gather", "all_reduce"], [64], ["f32"], ["bxor"])
    moved = grid(2, ["all_gather"], [64], ["f32", "i32"], ["bxor"], modes=["latency"])
    assert [case.dtype for case in moved] == ["f32", "i32"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_bus_factors_are_those_of_nccl_tests(ranks: int) -> None:
    share = Fraction(ranks - 1, ranks)
    expected = {"all_reduce": 2 * share, "barrier": 0, "broadcast": 1, "reduce": 1, "send_recv": 1}
    for name in vocabulary.COLLECTIVES:
        assert bus_factor(name, ranks) == pytest.approx(float(expected.get(name, share)))


@given(names, st.integers(0, 10**9), dtypes, st.integers(1, 9))
def test_a_case_is_whole_and_no_larger_than_asked(name: str, size: int, dtype: str, ranks: int) -> None:
    case = make_case(name, size, dtype, ranks)
    if name == "barrier":
        assert case.bytes == 0
        return
    item = vocabulary.DTYPES[dtype].itemsize
    unit = item * ranks if vocabulary.COLLECTIVES[name].blocked else item
    assert case.bytes % unit == 0
    assert case.bytes >= unit
    assert size - unit < case.bytes <= max(size, unit)


@given(names, st.integers(1, 10**7), dtypes, st.integers(1, 9))
def test_bytes_is_the_largest_buffer_of_any_rank(name: str, size: int, dtype: str, ranks: int) -> None:
    case = make_case(name, size, dtype, ranks)
    item = vocabulary.DTYPES[dtype].itemsize
    shapes = [layout(case, rank) for rank in range(ranks)]
    buffers = [prod(shape) * item for s in shapes for shape in (s.x, s.out) if shape is not None]
    assert max(buffers, default=0) == case.bytes


@given(st.integers(1, 10**6), st.integers(1, 9))
def test_all_to_all_v_counts_match_and_the_last_rank_gets_most(block: int, ranks: int) -> None:
    case = make_case("all_to_all_v", block * ranks * 4, "f32", ranks)
    shapes = [layout(case, rank) for rank in range(ranks)]
    for source in range(ranks):
        for target in range(ranks):
            assert shapes[source].send_counts[target] == shapes[target].recv_counts[source]
    for shape in shapes:
        assert shape.x == (sum(shape.send_counts),)
        assert shape.out == (sum(shape.recv_counts),)
    to = cases.all_to_all_v_blocks(block, ranks)
    assert to == sorted(to)
    assert to[-1] == block
    # so that (n-1)/n of the busiest rank's bytes crosses its link
    assert shapes[-1].recv_counts == (block,) * ranks


def test_rooted_buffers_exist_only_at_the_root() -> None:
    for name in ("gather", "reduce"):
        case = make_case(name, 1024, "f32", 3)
        assert [layout(case, r).out is not None for r in range(3)] == [True, False, False]
    case = make_case("scatter", 1024, "f32", 3)
    assert [layout(case, r).x is not None for r in range(3)] == [True, False, False]


def test_the_grid_has_every_case_once() -> None:
    grid = cases.grid(2, list(vocabulary.COLLECTIVES), [1, 8, 9, 1024], placements=vocabulary.PLACEMENTS)
    assert len(grid) == len(set(grid))
    assert sum(case.collective == "barrier" for case in grid) == len(vocabulary.MODES)
    sizes = {case.bytes for case in grid if case.collective == "all_gather"}
    assert sizes == {8, 1024}  # 1 and 9 round to a block of one f32 for each of two ranks
    assert all(case.op is None for case in grid if case.collective == "broadcast")
    assert all(case.placement == "out_of_place" for case in grid if case.collective == "send_recv")


def test_the_grid_has_every_offset_of_what_has_buffers() -> None:
    grid = cases.grid(2, ["all_reduce", "barrier"], [8, 64], offsets=(0, 16), modes=["latency"])
    found = sorted((case.collective, case.bytes, case.offset) for case in grid)
    sized = [("all_reduce", size, offset) for size in (8, 64) for offset in (0, 16)]
    assert found == [*sized, ("barrier", 0, 0)]


def test_the_grid_has_inputs_of_both_kinds_but_of_a_barrier() -> None:
    grid = cases.grid(2, ["all_reduce", "barrier"], [8], inputs=("kept", "written"), modes=["latency"])
    found = sorted((case.collective, case.inputs) for case in grid)
    assert found == [("all_reduce", "kept"), ("all_reduce", "written"), ("barrier", "kept")]


def test_an_offset_is_where_an_element_can_begin() -> None:
    assert make_case("all_reduce", 64, "f32", 2, offset=4).offset == 4
    with pytest.raises(cases.CaseError, match="f64 begins at multiples of its 8 bytes"):
        make_case("all_reduce", 64, "f64", 2, offset=4)


def test_queues_depend_on_the_size_alone() -> None:
    def calls(size: int, mode: str = "throughput") -> int:
        return cases.calls_per_sample(make_case("all_reduce", size, "f32", 2, mode=mode))

    assert [calls(size) for size in (8, 64 << 10, 1 << 20, 2 << 20, 256 << 20)] == [20, 20, 4, 2, 2]
    assert calls(8, "latency") == 1
    assert cases.calls_per_sample(make_case("barrier", 0, "u8", 2, mode="throughput")) == 20
