"""The shapes in workloads.toml, recomputed from the models' published numbers."""

from __future__ import annotations

import pytest

from unisono.bench import workloads
from unisono.bench.cases import CaseError
from unisono.bench.options import PRESETS
from unisono.records import Workload, vocabulary


def by_name(ranks: int = 2) -> dict[str, Workload]:
    return {workload.name: workload for workload, _ in workloads.select(workloads.entries(), ranks)}


def test_llama_3_70b_tensor_parallel() -> None:
    hidden, layers = 8192, 80
    found = by_name()
    tokens = {f"decode-batch-{n}": n for n in (1, 8, 32, 128)} | {
        f"prefill-tokens-{n}": n for n in (512, 2048, 8192)
    }
    for suffix, count in tokens.items():
        workload = found[f"llama-3-70b-tp-{suffix}"]
        assert workload.units_per_step == layers
        (step,) = workload.steps
        assert (step.collective, step.dtype, step.op, step.calls) == ("all_reduce", "bf16", "sum", 2)
        assert step.bytes == count * hidden * 2


def test_ddp_buckets_hold_all_gradients_of_resnet_50() -> None:
    steps = by_name()["ddp-resnet-50"].steps
    assert sum(step.bytes * step.calls for step in steps) == 25_557_032 * 4
    assert {step.bytes for step in steps} >= {1 << 20, 25 << 20}
    assert max(step.bytes for step in steps) == 25 << 20


def test_fsdp_llama_3_8b_layer() -> None:
    hidden, ffn, heads, kv_heads, head = 4096, 14336, 32, 8, 128
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    layer = attention + 3 * hidden * ffn + 2 * hidden
    workload = by_name()["fsdp-llama-3-8b"]
    gather, scatter = workload.steps
    assert (gather.collective, gather.bytes, gather.calls) == ("all_gather", layer * 2, 2)
    assert (scatter.collective, scatter.bytes, scatter.calls) == ("reduce_scatter", layer * 4, 1)
    assert workload.units_per_step == 32


@pytest.mark.parametrize(("name", "tokens"), [("decode", 128), ("prefill", 4096)])
def test_deepseek_v3_expert_parallel(name: str, tokens: int) -> None:
    workload = by_name()[f"deepseek-v3-ep-{name}"]
    dispatch, combine = workload.steps
    assert workload.units_per_step == 61 - 3
    assert (dispatch.dtype, dispatch.bytes) == ("f8e4m3", tokens * 8 * 7168)
    assert (combine.dtype, combine.bytes) == ("bf16", tokens * 8 * 7168 * 2)


@pytest.mark.parametrize(
    ("name", "layers", "experts", "hidden"),
    [("deepseek-v3-moe", 61 - 3, 256, 7168), ("qwen3-235b-moe", 94, 128, 4096)],
)
@pytest.mark.parametrize("tokens", [128, 1024])
def test_mixture_of_experts_layers(name: str, layers: int, experts: int, hidden: int, tokens: int) -> None:
    workload = by_name()[f"{name}-tokens-{tokens}"]
    assert workload.units_per_step == layers
    assert [step.collective for step in workload.steps] == ["moe_dispatch", "moe_combine"]
    for step in workload.steps:
        assert step.moe is not None
        assert (step.moe.tokens, step.moe.hidden, step.moe.experts) == (tokens, hidden, experts)
        assert (step.moe.top_k, step.dtype, step.calls) == (8, "bf16", 1)


def test_mixtures_of_experts_have_as_many_experts_on_each_rank() -> None:
    for step in by_name(3)["qwen3-235b-moe-tokens-128"].steps:
        assert step.moe is not None and step.moe.experts == 126
    ((_, cases),) = workloads.select(["deepseek-v3-moe-tokens-128"], 2, "cuda")
    assert {(case.device, case.mode) for case in cases} == {("cuda", "graph")}


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8])
def test_every_step_has_its_case(ranks: int) -> None:
    for workload, needed in workloads.select(workloads.entries(), ranks):
        have = {(c.collective, c.bytes, c.dtype, c.op, c.moe, c.matmul) for c in needed}
        wanted = {(s.collective, s.bytes, s.dtype, s.op, s.moe, s.matmul) for s in workload.steps}
        assert have == wanted
        assert workload.source
        assert all(case.ranks == ranks and case.mode == "latency" for case in needed)


def test_names() -> None:
    assert workloads.split_workloads("none") == []
    assert workloads.split_workloads("all", "cuda") == list(workloads.entries())
    assert [w.name for w, _ in workloads.select(["llama-3-70b-tp-decode-batch-8"], 2)] == [
        "llama-3-70b-tp-decode-batch-8"
    ]
    with pytest.raises(CaseError, match=r"llama-3-70b-tp-decode, .*deepseek-v3-ep-prefill"):
        workloads.split_workloads("llama-4")


def test_the_presets_name_known_workloads() -> None:
    for preset in PRESETS.values():
        workloads.split_workloads(",".join(preset.workloads))
        assert set(preset.dtypes) <= set(vocabulary.DTYPES)
        assert list(preset.sizes) == sorted(set(preset.sizes))
    assert PRESETS["quick"].workloads
