"""unisono.torch's fused matmuls: bits, gradients, torch.compile, plans, wrong calls, and a rank that dies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest

import ranks
import threads
import unisono
from faults import assert_lost, assert_nothing_left
from reference import difference

pytestmark = pytest.mark.torch
if find_spec("torch") is not None:
    import torch

    import unisono.torch as ut
    from torch_matmul import Recorded, Together, exact, numbers, random, share_of, summed
    from unisono.torch.matmul import plan

SEVERAL = [1, 2, 3, 4, 5, 8]
DEPTH, WIDTHS = 12, (20, 7)
DTYPES = ("float32", "bfloat16", "float64")


def compare(got: Any, expected: Any) -> None:
    wrong = difference(
        numbers(got), expected if not isinstance(expected, torch.Tensor) else numbers(expected)
    )
    assert wrong is None, str(wrong)


def cases(n: int) -> list[tuple[int, int | None, str]]:
    """Returns extents of the shared axis, chunks and dtypes. Shares are uneven, or some ranks have no row."""
    extents = [6 * n, 5 * n - 1, n + 1, 0]
    chunks = [None, 1, 2, n, 2 * n + 1]
    return [
        (extent, number, DTYPES[(i + j) % 3])
        for i, extent in enumerate(extents)
        for j, number in enumerate(chunks)
    ]


@pytest.mark.parametrize("n", SEVERAL)
def test_all_gather(n: int) -> None:
    """Shards follow each other, and products are those of torch.mm of each chunk: own rows first."""

    def body(comm: unisono.Communicator) -> None:
        for extent, chunks, name in cases(n):
            dtype = getattr(torch, name)
            shards = [exact(9, extent, DEPTH, dtype=dtype)[share_of(extent, r, n)] for r in range(n)]
            whole, shard = torch.cat(shards), shards[comm.rank]
            bs = [exact(comm.rank, DEPTH, width, dtype=dtype) for width in WIDTHS]
            matmul = Recorded()
            options: dict[str, Any] = {"chunks": chunks, "gathered": extent}
            gathered, products = ut.fused_all_gather_matmul(comm, shard, bs, matmul=matmul, **options)
            compare(gathered, whole)
            for i, (b, product) in enumerate(zip(bs, products, strict=True)):
                compare(product, matmul.product(whole, b, i))
            mine, rows = share_of(extent, comm.rank, n), matmul.rows()
            assert len(rows) <= (chunks or 1) + n and (chunks != 1 or len(rows) <= 1)
            if mine.start < mine.stop:
                assert rows[0][0] <= mine.start < rows[0][1]
            turned = sorted(rows)
            assert rows in [turned[i:] + turned[:i] for i in range(len(rows) or 1)], "the order of the ring"
            again = ut.fused_all_gather_matmul(comm, shard, bs, return_A=False, **options)
            assert again[0] is None
            for mine_again, product in zip(again[1], products, strict=True):
                compare(mine_again, product)

    threads.with_threads(n, body)


@pytest.mark.parametrize("n", SEVERAL)
def test_reduce_scatter(n: int) -> None:
    """Each share is the sum in rank order of everyone's torch.mm of each chunk: own rows last."""
    products: list[Any] = [None] * n

    def body(comm: unisono.Communicator) -> None:
        for i, (extent, chunks, name) in enumerate(cases(n)):
            dtype, op = getattr(torch, name), "avg" if i % 3 == 2 else "sum"
            a = exact(comm.rank, extent, DEPTH, dtype=dtype)
            b = exact(comm.rank, DEPTH, WIDTHS[i % 2], dtype=dtype)
            matmul, mine = Recorded(), share_of(extent, comm.rank, n)
            got = ut.fused_matmul_reduce_scatter(comm, a, b, op, chunks=chunks, matmul=matmul)
            products[comm.rank] = matmul.product(a, b)
            comm.barrier()
            compare(got, summed([one[mine] for one in products], op))
            comm.barrier()
            compare(ut.fused_matmul_reduce_scatter(comm, a, b, op, chunks=chunks), got)
            rows = matmul.rows()
            if mine.start < mine.stop:
                assert rows[-1][0] < mine.stop <= rows[-1][1]

    threads.with_threads(n, body)


@pytest.mark.parametrize("n", SEVERAL)
def test_all_reduce(n: int) -> None:
    """The sum has the bits of torch.mm of each chunk and all_reduce; with a norm those of the fused norm."""

    def body(comm: unisono.Communicator) -> None:
        for i, (rows, chunks, name) in enumerate(cases(n)):
            dtype, split = getattr(torch, name), ("m", "n", None)[i % 3]
            a = exact(comm.rank, rows, DEPTH, dtype=dtype)
            b = exact(comm.rank, DEPTH, WIDTHS[0], dtype=dtype)
            matmul = Recorded()
            options: dict[str, Any] = {"split": split, "chunks": chunks}
            got = ut.matmul_all_reduce(comm, a, b, matmul=matmul, **options)
            whole = comm.all_reduce(matmul.product(a, b))
            compare(got, whole)
            compare(ut.matmul_all_reduce(comm, a, b, **options), whole)
            assert all(chunk.columns == slice(0, WIDTHS[0]) for chunk in matmul.chunks) or split == "n"
            if name == "float64":
                continue
            residual, weight = exact(9, rows, WIDTHS[0], dtype=dtype), exact(9, WIDTHS[0], dtype=dtype)
            norm: dict[str, Any] = {"residual": residual, "weight": weight, "eps": 1e-3}
            expected = comm.all_reduce_rms_norm(matmul.product(a, b), residual, weight, 1e-3)
            for one in (
                ut.matmul_all_reduce(comm, a, b, **options, **norm),
                ut.matmul_all_reduce(comm, a, b, **options, **norm, matmul=Recorded()),
            ):
                compare(one[0], expected[0])
                compare(one[1], expected[1])

    threads.with_threads(n, body)


def test_further_axes() -> None:
    """A may have more axes, of which another than the first is shared out."""

    def body(comm: unisono.Communicator) -> None:
        n = comm.size
        whole, b = random(9, 2, 5, 3, DEPTH, dtype=torch.float32), random(8, DEPTH, 4, dtype=torch.float32)
        shard = whole[:, share_of(5, comm.rank, n)]
        gathered, (product,) = ut.fused_all_gather_matmul(comm, shard, [b], 1, chunks=2, gathered=5)
        assert torch.equal(gathered, whole)
        torch.testing.assert_close(product, whole @ b)
        own = ut.fused_matmul_reduce_scatter(comm, whole, b, "avg", -2, chunks=2)
        torch.testing.assert_close(own, (whole @ b)[:, :, share_of(3, comm.rank, n)])
        residual, weight = torch.ones(2, 5, 3, 4), torch.ones(4)
        out, residual_out = ut.matmul_all_reduce(comm, whole, b, residual=residual, weight=weight, chunks=3)
        torch.testing.assert_close(residual_out, n * (whole @ b) + 1)
        torch.testing.assert_close(out, torch.nn.functional.rms_norm(residual_out, (4,), weight, 1e-6))
        assert ut.matmul_all_reduce(comm, whole[0, 0, 0], b).shape == (4,)
        none = ut.fused_matmul_reduce_scatter(comm, whole[:, :, :0], b, scatter_dim=1, chunks=2)
        assert none.shape == (2, 3 - comm.rank, 0, 4)

    threads.with_threads(2, body)


class Team:
    """Communicators of threads, for `Together`."""

    def __init__(self, communicators: list[unisono.Communicator]) -> None:
        self.communicators = communicators

    def run(self, body: Callable[[unisono.Communicator], Any]) -> list[Any]:
        return threads.together(self.communicators, body)


def fused_calls(extent: int) -> dict[str, tuple[Callable[..., Any], Callable[[int, int], tuple[int, int]]]]:
    """Returns calls of (comm, A, B) that give a tuple, with the shape of a rank's A."""

    def share(rank: int, n: int) -> tuple[int, int]:
        mine = share_of(extent, rank, n)
        return mine.stop - mine.start, 3

    def whole(_: int, __: int) -> tuple[int, int]:
        return extent, 3

    def gathers(comm: Any, a: Any, b: Any) -> Any:
        gathered, (first, second) = ut.fused_all_gather_matmul(
            comm, a, [b, b[:, :1] ** 2], chunks=3, gathered=extent
        )
        return gathered, first, second

    def products_alone(comm: Any, a: Any, b: Any) -> Any:
        return ut.fused_all_gather_matmul(comm, a, [b], return_A=False, gathered=extent)[1]

    return {
        "all_gather": (gathers, share),
        "all_gather, products alone": (products_alone, share),
        "reduce_scatter": (lambda c, a, b: (ut.fused_matmul_reduce_scatter(c, a, b, chunks=2),), whole),
        "avg": (lambda c, a, b: (ut.fused_matmul_reduce_scatter(c, a, b, "avg"),), whole),
        "all_reduce": (lambda c, a, b: (ut.matmul_all_reduce(c, a, b, split="n", chunks=2),), whole),
    }


@pytest.mark.parametrize(
    "name", ["all_gather", "all_gather, products alone", "reduce_scatter", "avg", "all_reduce"]
)
@pytest.mark.parametrize("n", [1, 3])
def test_gradients(n: int, name: str) -> None:
    """gradcheck of the function of all ranks' inputs, whose shares are uneven."""
    extent = 4
    call, shape = fused_calls(extent)[name]
    inputs = []
    for rank in range(n):
        inputs.append(random(rank, *shape(rank, n), dtype=torch.float64, requires_grad=True))
        inputs.append(random(rank + 20, 3, 2, dtype=torch.float64, requires_grad=True))
    with threads.team(n) as communicators:
        team = Team(communicators)
        assert torch.autograd.gradcheck(lambda *x: Together.apply(team, call, *x), inputs)


def test_gradients_of_the_norm() -> None:
    """As plain torch has them. Each rank's residual and weight have the gradient of its own outputs."""
    n, rows, width = 2, 5, 8
    shapes = ((rows, 3), (3, width), (rows, width), (width,))
    made = [
        [random(r if i < 2 else 9, *s, dtype=torch.float32) for i, s in enumerate(shapes)] for r in range(n)
    ]
    scales = [random(30 + r, rows, width, dtype=torch.float32) for r in range(n)]

    def loss(outputs: Any, rank: int) -> Any:
        return (outputs[0] * scales[rank]).sum() + (outputs[1] ** 2 * scales[rank]).sum()

    def body(comm: unisono.Communicator) -> Any:
        own = [x.clone().requires_grad_() for x in made[comm.rank]]
        a, b, residual, weight = own
        outputs = ut.matmul_all_reduce(comm, a, b, residual=residual, weight=weight, chunks=2)
        return torch.autograd.grad(loss(outputs, comm.rank), own)

    came = threads.with_threads(n, body)
    own = [[x.clone().requires_grad_() for x in of_rank] for of_rank in made]
    total = sum(a @ b for a, b, _, _ in own)
    losses = []
    for rank, (_, _, residual, weight) in enumerate(own):
        v = total + residual
        losses.append(loss((torch.nn.functional.rms_norm(v, (width,), weight, 1e-6), v), rank))
    expected = iter(torch.autograd.grad(sum(losses), [x for of_rank in own for x in of_rank]))
    for of_rank in came:
        for got in of_rank:
            torch.testing.assert_close(got, next(expected), rtol=1e-4, atol=1e-4)


def test_compiled() -> None:
    """torch.compile traces a block with all of them as one graph, also with another communicator. Values and
    gradients are those of eager calls, which the other rank makes in a thread: PyTorch compiles in this one.
    """

    def block(comm: unisono.Communicator, x: Any, w: Any, v: Any) -> Any:
        _, (h,) = ut.fused_all_gather_matmul(comm, x, [w], return_A=False, chunks=2)
        y = ut.fused_matmul_reduce_scatter(comm, torch.relu(h), v, chunks=2)
        z = ut.matmul_all_reduce(comm, y, w, split="n", chunks=2)
        out, rows = ut.matmul_all_reduce(comm, z, v, residual=y, weight=y[0])
        return (out * rows).sum() + z.square().sum()

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)

    def body(comm: unisono.Communicator) -> list[Any]:
        found = []
        for function in (block, compiled if comm.rank == 0 else block):
            x = random(comm.rank, 6, DEPTH, dtype=torch.float32, requires_grad=True)
            w = random(5, DEPTH, 8, dtype=torch.float32, requires_grad=True)
            v = random(6, 8, DEPTH, dtype=torch.float32, requires_grad=True)
            value = function(comm, x, w, v)
            found.append([value, *torch.autograd.grad(value, [x, w, v])])
        return found

    for n in (2, 1):
        with threads.team(n) as communicators, ThreadPoolExecutor(1) as other:
            ended = [other.submit(body, comm) for comm in communicators[1:]]
            eager, traced = body(communicators[0])
            for one in ended:
                one.result()
        for expected, got in zip(eager, traced, strict=True):
            torch.testing.assert_close(expected, got)


def test_ops_are_sound() -> None:
    """PyTorch's own check: schemas, fake kernels, gradients, and shapes that are symbols."""
    with threads.team(1) as (comm,):
        a = random(1, 4, 2, 3, dtype=torch.float32, requires_grad=True)
        b = random(2, 3, 8, dtype=torch.float32, requires_grad=True)
        residual, weight = (random(3, *s, dtype=torch.float32, requires_grad=True) for s in ((4, 8), (8,)))
        ops, number, rows = torch.ops.unisono, id(comm), a[:, 0].detach().requires_grad_()
        torch.library.opcheck(ops.all_gather_matmul, (a, [b, b[:, :3].detach()], number, 1, None, 2))
        torch.library.opcheck(ops.matmul_reduce_scatter, (a, b, number, 1, "sum", 2))
        torch.library.opcheck(ops.reduce_scatter, (a, number, 1))
        torch.library.opcheck(ops.all_reduce, (a, number))
        torch.library.opcheck(ops.matmul_all_reduce, (rows, b, number, "n", 2))
        norm = (rows, b, residual, weight, 1e-6, number, "", 0)
        torch.library.opcheck(ops.matmul_all_reduce_rms_norm, norm)


A, B = "ones(4, 3)", "ones(3, 8)"
WRONG = {
    "chunks=0 cuts into nothing": "all_reduce(comm, A, B, chunks=0)",
    "chunks=-1 cuts into nothing": "reduce_scatter(comm, A, B, chunks=-1)",
    r"B has shape \(4, 3\).*takes \(3, N\)": "all_gather(comm, A, [B, A])",
    r"B has shape \(3, 8\) and dtype torch.float64": "all_reduce(comm, A, B.double())",
    r"B has shape \(3, 8, 1\)": "reduce_scatter(comm, A, B[..., None])",
    "dtype torch.int32: give floating": "all_reduce(comm, A.int(), B.int())",
    "A has 1 axes: give 2": "reduce_scatter(comm, A[0], B)",
    "gather_dim=1 is no axis of A but the last.*0 to 0": "all_gather(comm, A, [B], 1)",
    "scatter_dim=-1 is no axis": "reduce_scatter(comm, A, B, scatter_dim=-1)",
    "scatter_dim=2 is no axis": "reduce_scatter(comm, A, B, scatter_dim=2)",
    "op 'max' is not for a sum": "reduce_scatter(comm, A, B, 'max')",
    "split 'k' is unknown": "all_reduce(comm, A, B, split='k')",
    "residual and weight go together": "all_reduce(comm, A, B, residual=ones(4, 8))",
    r"weight has shape \(3,\).*takes \(8,\)": "all_reduce(comm, A, B, residual=ones(4, 8), weight=ones(3))",
    r"residual has shape \(8, 4\)": "all_reduce(comm, A, B, residual=ones(8, 4), weight=ones(8))",
    "weight has shape.*float64": "all_reduce(comm, A, B, residual=ones(4, 8), weight=ones(8).double())",
    "A_shard has 4 along gather_dim, but of 9 rank 0 of 1": "all_gather(comm, A, [B], gathered=9)",
    "has no gradient: leave matmul= out": "all_reduce(comm, A.requires_grad_(), B, matmul=print)",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_calls(words: str) -> None:
    with threads.team(1) as (comm,):
        names = {
            "ones": torch.ones,
            "comm": comm,
            "A": torch.ones(4, 3),
            "B": torch.ones(3, 8),
            "all_reduce": ut.matmul_all_reduce,
            "reduce_scatter": ut.fused_matmul_reduce_scatter,
            "all_gather": ut.fused_all_gather_matmul,
        }
        with pytest.raises(unisono.UsageError, match=words):
            eval(WRONG[words], names)


def test_ranks_that_differ() -> None:
    """Another number of chunks, or another eps, is noticed by the check, on every rank."""
    a, b = torch.ones(8, 3), torch.ones(3, 8)
    ones = {"residual": torch.ones(8, 8), "weight": torch.ones(8)}
    calls: dict[str, Callable[[unisono.Communicator], Any]] = {
        "chunks": lambda c: ut.fused_matmul_reduce_scatter(c, a, b, chunks=2 + 2 * c.rank),
        "eps": lambda c: ut.matmul_all_reduce(c, a, b, **ones, eps=10.0 ** -(3 + c.rank), chunks=2),
    }
    for call in calls.values():
        with threads.team(2) as communicators:
            errors = threads.attempt(communicators, call)
            assert {type(error) for error in errors} == {unisono.MismatchError}


def test_plans() -> None:
    """Chunks where sending takes long beside the matmul, and not where they cost more than they hide."""

    def planned(rows: int, columns: int, depth: int, ranks: int, gathers: bool) -> list[int]:
        panels = plan.of_shares(plan.shares(rows, ranks), (columns,), depth, 2, 132, gathers)
        return [len(panel) for panel in panels]

    for n in (2, 4, 8):
        shares = [8192 // n] * n
        assert planned(8192, 2048, 8192, n, True) == planned(8192, 8192, 2048, n, False) == shares
    assert planned(128, 2048, 8192, 8, True) == planned(128, 8192, 2048, 8, False) == [128]
    assert planned(1024, 8192, 3584, 8, False) == [1024]  # each chunk would read all of B
    assert planned(4100, 8192, 2048, 4, False) == [1025] * 4
    assert planned(5, 8192, 2048, 4, False) == [5]  # the last rank has none
    assert planned(0, 2048, 8192, 8, True) == []


@pytest.mark.parametrize("n", SEVERAL)
def test_panels(n: int) -> None:
    """Panels have every row once, and each rank takes each of them once."""
    for rows in (0, 1, n - 1, n, 128 * n, 1000 * n + 3):
        for unit in (1, 3):
            owned = plan.shares(rows * unit, n, unit)
            assert [len(share) for share in owned] == [
                unit * (s.stop - s.start) for s in (share_of(rows, r, n) for r in range(n))
            ]
            for chunks in (1, 2, 3, n, n + 1, 4 * n):
                panels = plan.by_shares(owned, chunks)
                assert [row for panel in panels for row in panel] == list(range(rows * unit))
                assert len(panels) < chunks + n and all(panels)
                for own_last in (False, True):
                    for turn in plan.orders(panels, owned, own_last):
                        assert tuple(sorted(turn, key=lambda panel: panel.start)) == panels
            even = plan.evenly(range(rows * unit), 5)
            assert [row for panel in even for row in panel] == list(range(rows * unit)) and len(even) <= 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "int64", "float8_e4m3fn"])
def test_arrays_combined(dtype: str) -> None:
    """The bits of an all_reduce of ranks that have these arrays."""
    kind = getattr(torch, dtype)
    parts = [random(r, 37, dtype=torch.float32).mul(3).to(kind) for r in range(3)]
    combined = unisono._core.combine_arrays
    for op in ("sum", "prod", "min", "max", "avg"):
        expected = threads.with_threads(3, lambda c: c.all_reduce(parts[c.rank], op))[0]  # noqa: B023
        assert torch.equal(combined(parts, op).view(torch.uint8), expected.view(torch.uint8))
    out = parts[0].clone()
    assert combined([out, *parts[1:]], out=out) is out
    assert torch.equal(out.view(torch.uint8), combined(parts).view(torch.uint8))
    assert torch.equal(combined(parts[:1], "avg").view(torch.uint8), parts[0].view(torch.uint8))
    for wrong in ([], [parts[0], parts[0][:1]], [parts[0], parts[0].double()]):
        with pytest.raises(unisono.UsageError, match=r"xs is empty|another shape, dtype"):
            combined(wrong)


def test_rank_that_dies() -> None:
    """Rank 1 dies before its second chunk: the others' calls end."""
    marker = ranks.new_marker()
    outcome = ranks.play(3, "torch_matmul_programs:killed_between_chunks", env=marker)
    assert_lost(outcome, victim=1)
    assert_nothing_left(outcome, marker["UNISONO_TEST"])
