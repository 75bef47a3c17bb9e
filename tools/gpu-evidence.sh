#!/usr/bin/env bash
# Builds, checks and measures on all GPUs of this machine, in one call of under 10 minutes.
#   gpu-evidence.sh OUT [STEP ...]   steps: build check soak moe norm collectives; default: all
# OUT gets a log of each step, steps.txt with their exit codes and seconds, and the records. A step that fails or runs
# out of its time does not stop the others; the exit status is then 1. Variables: PYTHON (python3), PEERS (a folder of the
# unpacked wheels of moe-ops, transformer_engine and torchtitan, and of what tools/moe-streams.py needs), FUSION_PEERS (what
# tools/norm-streams.py needs), and what the Makefile takes. Multicast stays off.
set -uo pipefail
[[ $# -gt 0 ]] || { sed -n '2,7s/^# //p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd) steps=("${@:2}")
cd "$(dirname "$0")/.." || exit
[[ ${#steps[@]} -gt 0 ]] || steps=(build check soak moe norm collectives)
python=${PYTHON:-python3}
gpus=$(nvidia-smi -L | wc -l)
ranks=$((gpus > 1 ? gpus : 2))
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 UNISONO_SHARE_DEVICE=1
cores=$(nproc)
export CMAKE_BUILD_PARALLEL_LEVEL=$cores PYTHONPATH=$PWD/build/gpu${PEERS:+:$PEERS} CUDA_DEVICE_MAX_CONNECTIONS=32
export SKBUILD_CMAKE_DEFINE=${SKBUILD_CMAKE_DEFINE:-CMAKE_CUDA_ARCHITECTURES=90a-real}
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv >"$out/gpus.csv"
failed=0

# step NAME SECONDS COMMAND...: runs it if it is asked for, within its time.
step() {
  local name=$1 seconds=$2 group=${1%%-*} began=$SECONDS code=0
  shift 2
  [[ " ${steps[*]} " == *" $group "* ]] || return 0
  timeout -k 10 "$seconds" "$@" >"$out/$name.log" 2>&1 || code=$?
  [[ $code -eq 0 ]] || failed=1
  echo "$name: exit code $code, $((SECONDS - began)) s; $(tail -n 1 "$out/$name.log")" | tee -a "$out/steps.txt"
}
unisono=("$python" -m unisono)
bench=("${unisono[@]}" bench --device cuda --ranks "$gpus" --workload none -d bf16 --mode graph)

step build 180 make build/gpu/.installed PYTHON="$python"
step check-moe 90 "$python" -m pytest -q -m gpu tests/gpu/test_moe.py -n 0 -k "$ranks or wrong"
step check-norm 60 "$python" -m pytest -q -m gpu tests/gpu/test_norm.py -n 0
step check-collectives 70 "$python" -m pytest -q -m gpu tests/gpu/test_collectives.py -n 0 -x
UNISONO_SOAK=200000 step soak 75 "$python" -m pytest -q -m gpu tests/gpu/test_soak.py -n 0
step moe-one 50 "$python" tools/moe-gpu.py --json "$out/moe-one.json"
if [[ -d ${PEERS:-}/flashinfer ]]; then
  step moe-streams 60 "$python" tools/moe-streams.py --peers "$PEERS" --json "$out/moe-streams.json"
fi
step norm-tail 30 "$python" tools/norm-streams.py --ranks 1 --json "$out/norm-tail.json"
step norm-streams 40 "$python" tools/norm-streams.py --json "$out/norm-streams.json" --ranks 2,4,8 \
  ${FUSION_PEERS:+--peers "$FUSION_PEERS"}
step moe-bench 90 "${bench[@]}" --moe --hidden 7168 --tokens 1,16,128,1024,4096 --budget 60 \
  --layout "expert_major$([[ $gpus -gt 1 ]] && echo ,flat)" --out "$out/moe-bench"
if [[ $gpus -gt 1 ]]; then
  for low_latency in 0 1; do
    UNISONO_MOE_LOW_LATENCY=$low_latency step moe-few-$low_latency 35 "${bench[@]}" --moe --hidden 7168 --tokens 1,16,64 --budget 15 \
      --layout flat --out "$out/moe-few-$low_latency"
  done
  step moe-all 50 "${unisono[@]}" run -n "$gpus" "$python" tools/moe-gpu.py --json "$out/moe-all.json"
  step collectives-small 75 "${bench[@]}" --memory symmetric --collective all_reduce,all_gather,reduce_scatter,all_to_all,send_recv \
    --sizes 1K,16K,256K,1M,16M --budget 45 --out "$out/collectives-small"
  step collectives-large 60 "${bench[@]}" --memory symmetric --collective all_reduce,all_gather,reduce_scatter,all_to_all,send_recv \
    --sizes 64M,1G --budget 30 --out "$out/collectives-large"
  step collectives-v 40 "${bench[@]}" --memory plain --collective all_to_all_v --sizes 64K,1M,16M,64M --budget 15 \
    --out "$out/collectives-v"
fi
exit $failed
