"""Data and sums made with torch, on CPU tensors: the same code runs on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from unisono import traits  # noqa: E402
from unisono.bench import cells  # noqa: E402
from unisono.bench import verify as host  # noqa: E402
from unisono.bench.backends.base import Backend, Buffers  # noqa: E402
from unisono.bench.buffers import Pools, needed_bytes  # noqa: E402
from unisono.bench.cases import make_case  # noqa: E402
from unisono.bench.control import Control  # noqa: E402
from unisono.bench.cuda import memory, verify  # noqa: E402
from unisono.bench.device import HostDevice  # noqa: E402
from unisono.records import Case  # noqa: E402
from unisono.records.vocabulary import COLLECTIVES, DTYPES, OPS  # noqa: E402

pytestmark = pytest.mark.torch
HERE = verify.arithmetic("cpu")
RANKS = 5


def array(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    """Returns the tensor's bytes as a numpy array of that dtype."""
    return tensor.view(memory.bits_dtype(dtype)).numpy().view(DTYPES[dtype])


def region(size: int) -> memory.TensorRegion:
    return memory.TensorRegion(torch.empty(size, dtype=torch.uint8))


@pytest.mark.parametrize("op", [op for op in OPS if traits.has_op("i32", op, on_gpu=True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_have_the_bits_of_the_host_reference(dtype: str, op: str) -> None:
    case = make_case("all_reduce", 4096, dtype, RANKS, op)
    blocks = [verify.random_block(case, rank, 3, 1009, "cpu") for rank in range(RANKS)]
    arrays = [array(block, dtype) for block in blocks]
    mine, theirs = array(verify.combine(blocks, op, dtype), dtype), host.combine(arrays, op, dtype)
    assert mine.tobytes() == theirs.tobytes()
    found = host.tolerance([block.double() for block in blocks], op, dtype)
    expected = host.tolerance([host.cast(block, "f64") for block in arrays], op, dtype)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        np.testing.assert_allclose(found[0].numpy(), expected[0], rtol=1e-14)
        np.testing.assert_allclose(found[1].numpy(), expected[1], rtol=1e-14)


def test_data_is_the_same_wherever_it_is_made() -> None:
    """The data is fixed here: all ranks must agree on it, with any GPU and any version of torch."""
    bits = verify.random_bits(1, 2, 3, "cpu").tolist()
    state, mask = 0, (1 << 64) - 1

    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
        return word ^ (word >> 31)

    golden = 0x9E3779B97F4A7C15
    state = mix((mix((1 + golden) & mask) + 2 * golden) & mask)
    expected = [mix((state + step * golden) & mask) for step in (1, 2, 3)]
    assert [word & mask for word in bits] == expected


@pytest.mark.parametrize("dtype", [d for d in DTYPES if DTYPES[d].kind != "i" and d != "u8"])
def test_floats_are_of_either_sign_and_moderate(dtype: str) -> None:
    for op, low, high in (("sum", 0.5, 2.0), ("prod", 0.75, 1.25)):
        block = verify.random_block(make_case("all_reduce", 64, dtype, 2, op), 0, 5, 4000, "cpu")
        wide = block.to(torch.float64)
        assert bool((wide.abs() >= low).all() and (wide.abs() <= high).all())
        assert 0.4 < float((wide < 0).double().mean()) < 0.6
        assert len(wide.unique()) > 5


@pytest.mark.parametrize("dtype", ["i8", "u8", "i32", "i64"])
def test_integers_fill_their_range_but_for_averages(dtype: str) -> None:
    any_bits = verify.random_block(make_case("all_reduce", 64, dtype, 2, "sum"), 1, 5, 4000, "cpu")
    limits = torch.iinfo(any_bits.dtype)
    assert float(any_bits.double().max()) > 0.9 * limits.max
    assert float(any_bits.double().min()) <= 0.9 * limits.min
    small = verify.random_block(make_case("all_reduce", 64, dtype, 2, "avg"), 1, 5, 4000, "cpu")
    assert int(small.max()) == 100
    assert int(small.min()) == (0 if dtype == "u8" else -100)


def perform(case: Case, placed: list, pools: list[Pools]) -> None:
    """Performs the collective by torch copies between the ranks' buffers."""
    n = case.ranks
    xs = [p.buffers.x.clone() if p.buffers.x is not None else None for p in placed]
    for rank, p in enumerate(placed):
        out, own = p.buffers.out, p.buffers
        if out is None:
            continue
        match case.collective:
            case "all_reduce" | "reduce":
                out.copy_(verify.combine(xs, str(case.op), case.dtype))
            case "broadcast":
                out.copy_(xs[0])
            case "all_gather" | "gather":
                out.copy_(torch.stack([x.reshape(-1) for x in xs]).reshape(out.shape))
            case "reduce_scatter":
                out.copy_(verify.combine([x[rank] for x in xs], str(case.op), case.dtype))
            case "scatter":
                out.copy_(xs[0][rank])
            case "all_to_all":
                out.copy_(torch.stack([x[rank] for x in xs]))
            case "all_to_all_v":
                start = sum(own.send_counts[:rank])
                out.copy_(torch.cat([x[start : start + own.recv_counts[r]] for r, x in enumerate(xs)]))
            case "send_recv":
                out.copy_(xs[(rank - 1) % n])


CASES = [
    make_case(name, size, dtype, 3, placement=placement)
    for name in COLLECTIVES
    if name != "barrier"
    for size in (48, 60_000)
    for dtype in ("bf16", "i32")
    for placement in (("out_of_place", "in_place") if COLLECTIVES[name].in_place else ("out_of_place",))
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.collective}-{c.bytes}-{c.dtype}-{c.placement}")
def test_a_right_result_passes_and_one_wrong_element_does_not(case: Case) -> None:
    pools = [Pools([case], rank, region) for rank in range(case.ranks)]
    placed = [pool.place(case) for pool in pools]
    for exact in (True, False):
        expected = [host.expectation(case, rank, 9, exact, HERE) for rank in range(case.ranks)]
        for rank in range(case.ranks):
            host.arrange(placed[rank], expected[rank], HERE)
        perform(case, placed, pools)
        for rank in range(case.ranks):
            assert host.inspect(case, placed[rank], expected[rank], HERE) is None
    rank = next(r for r, p in enumerate(placed) if p.buffers.out is not None)
    flat = placed[rank].buffers.out.reshape(-1)
    flat[-1] = 3
    message = host.inspect(case, placed[rank], expected[rank], HERE)
    assert message is not None
    assert f"element {len(flat) - 1} is 3, expected" in message


def test_a_write_past_the_end_is_seen() -> None:
    case = make_case("broadcast", 4096, "f32", 2)
    placed = Pools([case], 0, region).place(case)
    expected = host.expectation(case, 0, 1, True, HERE)
    host.arrange(placed, expected, HERE)
    placed.buffers.out.copy_(placed.buffers.x)
    placed.guards[1][0] = 0
    assert host.inspect(case, placed, expected, HERE) == "the call wrote past a buffer."


def test_an_overwritten_input_is_seen() -> None:
    case = make_case("broadcast", 4096, "f32", 2)
    placed = Pools([case], 0, region).place(case)
    expected = host.expectation(case, 0, 1, True, HERE)
    host.arrange(placed, expected, HERE)
    placed.buffers.out.copy_(placed.buffers.x)
    placed.buffers.x[7] = 0
    assert "changed 1 element(s) of its input" in str(host.inspect(case, placed, expected, HERE))


def test_a_float_within_its_bound_passes_and_a_nan_does_not() -> None:
    block = torch.tensor([1.0, 2.0])
    bound = (block.double(), torch.tensor([1e-3, 1e-3], dtype=torch.float64))
    piece = host.Piece(0, 2, block, allowed=bound)
    assert verify.differences(torch.tensor([1.0005, 2.0]), [piece]) == (0, None)
    assert verify.differences(torch.tensor([1.0, 2.1]), [piece]) == (1, "element 1 is 2.1, expected 2")
    assert verify.differences(torch.tensor([float("nan"), 2.0]), [piece])[0] == 1


def test_long_pieces_are_written_and_compared_in_longer_rows() -> None:
    block = torch.arange(7, dtype=torch.float32)
    bound = (block.double(), torch.full((7,), 1e-3, dtype=torch.float64))
    flat = torch.zeros(1000)
    for offset in (0, 3):
        piece = host.Piece(2, 900, block, offset, bound)
        verify.write(flat, [piece])
        assert flat[2:902].tolist() == [float((offset + i) % 7) for i in range(900)]
        assert verify.differences(flat, [piece]) == (0, None)
        flat[801] += 1
        assert verify.differences(flat, [piece])[0] == 1
        assert "element 801 is" in str(verify.differences(flat, [piece])[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_ones_are_ones(dtype: str) -> None:
    made = region(64)
    made.fill_ones(64, dtype)
    ones = made.view((64 // DTYPES[dtype].itemsize,), dtype)
    assert bool((ones.to(torch.float64) == 1).all())
    assert str(ones.dtype).removeprefix("torch.") == DTYPES[dtype].name
    assert np.dtype(ml_dtypes.bfloat16) == DTYPES["bf16"]


class Alone:
    """The bootstrap of one rank."""

    rank, size = 0, 1

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]


class Elsewhere(Backend):
    """One rank's all_to_all in tensors of its own, while the run's buffers are numpy arrays."""

    name, bit_exact, own_memory, memory = "elsewhere", True, True, "device"

    def __init__(self, wrong: bool) -> None:
        self._wrong = wrong

    def allocate(self, size: int) -> tuple[Any, Any]:
        made = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        return memory.TensorRegion(made[0], arithmetic=HERE), memory.TensorRegion(made[1], arithmetic=HERE)

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        assert isinstance(buffers.x, torch.Tensor) and isinstance(buffers.out, torch.Tensor)

        def call() -> None:
            buffers.out.copy_(buffers.x)
            if self._wrong:
                buffers.out.view(-1)[-1] += 1

        return call


@pytest.mark.parametrize("wrong", [False, True])
def test_memory_that_lies_elsewhere_is_checked_there(wrong: bool) -> None:
    case = make_case("all_to_all", 4 * 1009, "f32", 1, memory="symmetric")
    backend = Elsewhere(wrong)
    pools = Pools([case], 0)
    pools.add_own(needed_bytes([case], "symmetric"), backend)
    (group,), _ = cells.make_groups([(case, None)], [backend])
    found = cells.check(Control(Alone()), pools, group, 5, HostDevice(lambda: None), first=False)
    assert len(found) == (len(group.variants) if wrong else 0)
    assert all("1 wrong element(s) of the output: element 1008" in one.message for one in found)
