"""Mixture of experts in the bench: routes, cases, the reference of the checks, and what the peers do."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from unisono.bench import moe, routes, verify, verify_moe
from unisono.bench.backends import permutation
from unisono.bench.cases import buffer_bytes, layout
from unisono.records import Case
from unisono.records.vocabulary import DTYPES, LAYOUTS, MOES, ROUTINGS, bus_factor_of, case_text

EXPERTS, HIDDEN = 8, 24


def a_case(name: str = "moe_round", ranks: int = 2, tokens: int = 5, **other: Any) -> Case:
    values: dict[str, Any] = {"hidden": HIDDEN, "experts": EXPERTS, "top_k": 3, "dtype": "f32"}
    return moe.case(name, ranks, tokens, **(values | other))


# ---- routes


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routes_are_the_same_for_all_who_ask_and_a_tokens_experts_differ(routing: str) -> None:
    found = routes.routes(4, 200, 16, 5, routing, 1)
    routes.routes.cache_clear()
    again = routes.routes(4, 200, 16, 5, routing, 1)
    np.testing.assert_array_equal(found.experts, again.experts)
    np.testing.assert_array_equal(found.weights, again.weights)
    ordered = np.sort(found.experts, axis=2)
    assert (np.diff(ordered, axis=2) > 0).all()
    assert ordered.min() >= 0 and ordered.max() < 16
    np.testing.assert_allclose(found.weights.sum(axis=2), 1, rtol=1e-5)
    assert (routes.routes(4, 200, 16, 5, routing, 2).experts != found.experts).any()


def test_routings_are_even_steep_or_to_one_rank() -> None:
    shares = {}
    for routing in ROUTINGS:
        counts = np.bincount(routes.routes(4, 2000, 16, 1, routing, 1).experts.reshape(-1), minlength=16)
        shares[routing] = np.sort(counts)[::-1] / 8000
    np.testing.assert_allclose(shares["uniform"], 1 / 16, rtol=0.25)
    zipf = 1 / np.arange(1, 17) ** 1.2
    np.testing.assert_allclose(shares["zipf"], zipf / zipf.sum(), rtol=0.25)
    assert routes.routes(4, 50, 16, 4, "one_hot", 1).homes.max() == 0
    assert routes.routes(8, 50, 16, 5, "one_hot", 1).homes.max() == 2  # two experts a rank: the next ones too


def by_hand(case: Case, rank: int) -> list[tuple[int, int, int]]:
    """The (source, token, place) of each row that the rank receives, without a sort of arrays."""
    found, here = routes.of(case), EXPERTS // case.ranks
    pairs = list(itertools.product(*map(range, found.experts.shape)))
    mine = [(int(found.experts[at]), *at) for at in pairs if found.experts[at] // here == rank]
    if routes.shape(case).layout == "expert_major":
        return [at for _, *at in sorted(mine, key=lambda one: one[0])]  # type: ignore[misc]
    return [(source, token, 0) for source, token in sorted({(s, t) for _, s, t, _ in mine})]


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_rows_of_a_rank(layout_name: str, ranks: int) -> None:
    case = a_case(ranks=ranks, layout=layout_name)
    for rank in range(ranks):
        rows = routes.rows(case, rank)
        found = list(zip(rows.source, rows.token, rows.place, strict=True))
        assert [tuple(map(int, row)) for row in found] == [tuple(row) for row in by_hand(case, rank)]


# ---- cases


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_bytes_count_a_token_once_for_each_rank_on_the_rank_with_the_most(layout_name: str) -> None:
    case = a_case("moe_dispatch", ranks=4, tokens=9, dtype="bf16", layout=layout_name)
    homes = routes.of(case).homes
    came = [[sum(bool((t == r).any()) for t in source) for source in homes] for r in range(4)]
    assert case.bytes == max(map(sum, came)) * HIDDEN * 2
    others = max(sum(rows) - rows[rank] for rank, rows in enumerate(came))
    assert case.moe is not None and case.moe.remote_bytes == others * HIDDEN * 2
    assert bus_factor_of(case) == case.moe.remote_bytes / case.bytes
    both = a_case("moe_round", ranks=4, tokens=9, dtype="bf16", layout=layout_name)
    assert both.bytes == 2 * case.bytes and bus_factor_of(both) == bus_factor_of(case)


def test_alone_nothing_comes_from_other_ranks() -> None:
    assert bus_factor_of(a_case(ranks=1)) == 0
    assert bus_factor_of(a_case(ranks=2, routing="one_hot")) == 0.5


def test_a_case_in_words_names_what_is_unusual() -> None:
    shape = "top-3 of 8, hidden 24"
    assert case_text(a_case()) == f"moe_round 5 tokens f32, {shape}, 2 ranks, latency, plain"
    rare = a_case(routing="one_hot", layout="flat")
    assert case_text(rare) == f"moe_round, one hot, flat rows 5 tokens f32, {shape}, 2 ranks, latency, plain"


def test_buffers_hold_tokens_or_rows() -> None:
    dispatch, combine, both = (a_case(name, tokens=7) for name in MOES)
    rows = [len(by_hand(combine, rank)) for rank in range(2)]
    assert (layout(dispatch, 1).x, layout(dispatch, 1).out) == ((7, HIDDEN), None)
    assert (layout(combine, 1).x, layout(combine, 1).out) == ((rows[1], HIDDEN), (7, HIDDEN))
    assert (layout(both, 1).x, layout(both, 1).out) == ((7, HIDDEN), (7, HIDDEN))
    assert buffer_bytes(combine) == max(rows) * HIDDEN * 4


def test_a_grid_is_the_product_and_knows_what_cannot_run() -> None:
    grid = moe.Grid(tokens=(1, 4), top_k=(2, 8), layouts=LAYOUTS, dtypes=("f32", "bf16"))
    found = grid.cases(2, ["all_reduce", "moe_round", "moe_dispatch"])
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2 * 2
    assert {case.collective for case in found} == {"moe_round", "moe_dispatch"}
    assert grid.problem(2) is None
    assert "3 ranks cannot have as many each" in str(grid.problem(3))
    assert "--top-k 8: there are only 4 experts" in str(moe.Grid(experts=4).problem(2))


# ---- the reference


def rows_of(case: Case, rank: int, seed: int) -> Any:
    """The rank's input, as a run writes it."""
    shape = layout(case, rank).x
    assert shape is not None
    flat = np.zeros(int(np.prod(shape)), DTYPES[case.dtype])
    verify.write(flat, verify_moe.expectation(case, rank, 3, True, verify.NUMPY).x)
    return flat.reshape(shape)


def expected(case: Case, rank: int, bit_exact: bool = True) -> tuple[Any, list[verify.Piece]]:
    pieces = list(verify_moe.expectation(case, rank, 3, bit_exact, verify.NUMPY).out)
    blocks = [piece.block for piece in pieces] or [np.zeros(0, DTYPES[case.dtype])]
    return np.concatenate(blocks).reshape(-1, HIDDEN), pieces


def sums_by_hand(case: Case, rank: int) -> Any:
    """Returns a combine's result, one token and element after the other."""
    found, kind = routes.of(case), DTYPES[case.dtype]
    given = [rows_of(case, r, 3) for r in range(case.ranks)]
    flat = routes.shape(case).layout == "flat"
    out = np.zeros((routes.shape(case).tokens, HIDDEN), kind)
    for token in range(len(out)):
        total = np.zeros(HIDDEN, np.float32)
        for home in range(case.ranks):
            at = [i for i, (s, t, _) in enumerate(by_hand(case, home)) if (s, t) == (rank, token)]
            at.sort(key=lambda i: by_hand(case, home)[i][2])
            part = np.zeros(HIDDEN, np.float32)
            for i in at:
                y = given[rank][token] if case.collective == "moe_round" else given[home][i]
                weight = np.float32(1) if flat else found.weights[rank, token, by_hand(case, home)[i][2]]
                part += weight * y.astype(np.float32)
            total += part.astype(kind).astype(np.float32)
        out[token] = total.astype(kind)
    return out


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("name", MOES)
def test_the_reference_is_the_definition(name: str, layout_name: str, dtype: str) -> None:
    case = a_case(name, dtype=dtype, layout=layout_name)
    for rank in range(2):
        wanted, pieces = expected(case, rank)
        if name == "moe_dispatch":
            x = [rows_of(case, r, 3) for r in range(2)]
            made = np.stack([x[source][token] for source, token, _ in by_hand(case, rank)])
        else:
            made = sums_by_hand(case, rank)
        np.testing.assert_array_equal(made.view(np.uint8), wanted.view(np.uint8))
        assert verify.differences(made.reshape(-1), pieces) == (0, None)
        made[1, 2] += made[1, 2].dtype.type(1)
        assert verify.differences(made.reshape(-1), pieces)[0] == 1


def test_the_reference_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MOES:
        case = a_case(name, tokens=20)
        whole, _ = expected(case, 1)
        with monkeypatch.context() as small:
            small.setattr(verify_moe, "CHUNK_ELEMENTS", 3 * HIDDEN)
            parts, pieces = expected(case, 1)
            assert len(pieces) > 3
            assert verify.differences(whole.reshape(-1), pieces) == (0, None)
        np.testing.assert_array_equal(whole, parts)


def test_other_orders_are_within_the_bound_and_a_lost_expert_is_not() -> None:
    case = a_case(dtype="bf16", tokens=30)
    found, x = routes.of(case), rows_of(case, 0, 3).astype(np.float32)
    weights = found.weights[0].astype(DTYPES["bf16"]).astype(np.float32)
    backwards = (weights[:, ::-1].sum(axis=1, keepdims=True) * x).astype(DTYPES["bf16"])
    _, pieces = expected(case, 0, bit_exact=False)
    assert verify.differences(backwards.reshape(-1), pieces) == (0, None)
    lost = (weights[:, 1:].sum(axis=1, keepdims=True) * x).astype(DTYPES["bf16"])
    assert verify.differences(lost.reshape(-1), pieces)[0] > 100


# ---- the peers' permutation


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_peers_plans_of_all_ranks_fit_together(ranks: int, routing: str) -> None:
    """A rank's plan awaits what the other plans send there, and its rows are the layout's."""
    case = a_case("moe_dispatch", ranks=ranks, routing=routing)
    found = routes.of(case)
    x = [rows_of(case, rank, 3) for rank in range(ranks)]
    plans = [permutation.make_plan(found.experts, found.weights, r, EXPERTS, True) for r in range(ranks)]
    for rank, plan in enumerate(plans):
        assert plan.recv_counts == [other.send_counts[rank] for other in plans]
        starts = [sum(other.send_counts[:rank]) for other in plans]
        parts = zip(x, plans, starts, strict=True)
        came = [rows[p.sent[start : start + p.send_counts[rank]]] for rows, p, start in parts]
        np.testing.assert_array_equal(np.concatenate(came)[plan.rows], expected(case, rank)[0])
        assert int(plan.counts.sum()) == len(plan.rows)


def test_bags_of_as_many_members_are_summed_together() -> None:
    bags = permutation.Bags(np.array([2, 0, 1, 2]), np.array([7, 3, 5, 1, 0]), np.arange(5.0))
    one, two = bags.sums
    assert one.groups.tolist() == [2] and one.members.tolist() == [[5]]
    assert two.groups.tolist() == [0, 3] and two.members.tolist() == [[7, 3], [1, 0]]
    assert two.weights.tolist() == [[0, 1], [3, 4]]
    where, members, _ = two.part(0, 2)
    assert where.tolist() == [0, 3] and members is not None
    assert two.part(1, 2)[0] == slice(3, 4)
