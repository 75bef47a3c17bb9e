"""Virtual nodes of two GPUs each: within a node by the CUDA lane, between nodes by NCCL; on 4 GPUs."""

from __future__ import annotations

import pytest

import ranks
import unisono

pytestmark = pytest.mark.gpu
of_one = pytest.mark.skipif(unisono.device_count() < 1, reason="needs a GPU: this machine has none")
of_four = pytest.mark.skipif(
    unisono.device_count() < 4, reason=f"needs 4 GPUs: this machine has {unisono.device_count()}"
)


@of_four
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_collectives_of_two_nodes(dtype: str) -> None:
    """Every collective on GPU arrays gives the bits of the same call on host arrays, which have the
    contract's tests."""
    outcome = ranks.play(4, "node_programs:gpu_and_host", dtype, nodes=2, timeout_s=200)
    for said in outcome.results():
        assert said == {"nodes": [[0, 1], [2, 3]], "wrong": []}


@of_four
def test_sums_on_several_streams() -> None:
    assert ranks.play(4, "node_programs:gpu_streams", 60, nodes=2, timeout_s=200).results() == [0, 0, 0, 0]


@of_four
def test_a_rank_that_stays_away() -> None:
    """Also those come back who wait for their stream by CUDA alone."""
    *others, _ = ranks.play(4, "node_programs:gpu_one_is_late", 4.0, nodes=2, timeout_s=200).results()
    for said in others:
        assert said["waited"] < 12
        assert said["next"]["error"]["type"] in ("TimeoutError", "PeerLostError"), said


@of_four
def test_close_lets_what_is_under_way_end() -> None:
    outcome = ranks.play(4, "node_programs:gpu_closes_at_once", nodes=2, timeout_s=200)
    assert outcome.results() == [True] * 4


@of_one
def test_nobody_joins() -> None:
    (said,) = ranks.play(1, "node_programs:gpu_joins_alone", 3.0, timeout_s=200).results()
    assert said["error"]["type"] == "TimeoutError" and "NCCL_SOCKET_IFNAME" in said["error"]["text"]


@of_one
def test_a_graph_keeps_its_scratch() -> None:
    """Also when a later call has made it larger: nothing else gets that memory."""
    import torch

    from unisono.nodes.cuda_space import CudaSpace

    space, size = CudaSpace(torch.device("cuda", 0)), 64 << 20
    stream, graph = torch.cuda.Stream(0), torch.cuda.CUDAGraph()
    space.scratch("kept", size)
    with torch.cuda.graph(graph, stream=stream), space.on(stream.cuda_stream):
        space.scratch("kept", size).fill_(1)
    with space.on(stream.cuda_stream):
        space.scratch("kept", 2 * size).fill_(2)
    torch.cuda.synchronize(0)
    others = [torch.full((size,), 3, dtype=torch.uint8, device="cuda:0") for _ in range(2)]
    graph.replay()
    torch.cuda.synchronize(0)
    assert all(bool((other == 3).all()) for other in others)


@of_one
def test_calls_on_two_streams_share_their_scratch() -> None:
    """The later one waits for the earlier one, whose stream is still busy."""
    import torch

    from unisono.nodes.cuda_space import CudaSpace

    space = CudaSpace(torch.device("cuda", 0))
    one, other = torch.cuda.Stream(0), torch.cuda.Stream(0)
    with space.on(one.cuda_stream):
        torch.cuda._sleep(100_000_000)
        space.scratch("kept", 4096).fill_(1)
    with space.on(other.cuda_stream):
        seen = space.scratch("kept", 4096).clone()
        larger = space.scratch("kept", 1 << 20).fill_(2)
    with space.on(0):
        assert torch.cuda.current_stream(0).cuda_stream == 0
        seen += larger[:4096]
    torch.cuda.synchronize(0)
    assert seen.tolist() == [3] * 4096
