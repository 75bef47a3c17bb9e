#!/usr/bin/env bash
# Builds, checks and measures on all GPUs of this machine, in one call of under 10 minutes.
#   gpu-evidence.sh OUT [STEP ...]   steps: build check moe norm matmul collectives train soak, or one of them, as moe-all;
#   default: all
# OUT gets a log of each step, steps.txt with their exit codes and seconds, and the records. A step that fails or runs
# out of its time does not stop the others; the exit status is then 1. Variables: PYTHON (python3), SECONDS_LEFT (570, of
# all steps), PEERS (a folder of the unpacked wheels of moe-ops, transformer_engine and torchtitan, and of what
# tools/moe-streams.py needs), FUSION_PEERS (what tools/norm-streams.py needs), and what the Makefile takes. Multicast
# stays off.
set -uo pipefail
[[ $# -gt 0 ]] || { sed -n '2,10s/^# //p' "$0" >&2; exit 2; }
end=$((SECONDS + ${SECONDS_LEFT:-570}))
mkdir -p "$1"
out=$(cd "$1" && pwd) steps=("${@:2}")
cd "$(dirname "$0")/.." || exit
[[ ${#steps[@]} -gt 0 ]] || steps=(build check moe norm matmul collectives train soak)
python=${PYTHON:-python3}
gpus=$(nvidia-smi -L | wc -l)
ranks=$((gpus > 1 ? gpus : 2))
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 UNISONO_SHARE_DEVICE=1
cores=$(nproc)
export CMAKE_BUILD_PARALLEL_LEVEL=$cores PYTHONPATH=$PWD/build/gpu${PEERS:+:$PEERS} CUDA_DEVICE_MAX_CONNECTIONS=32
export SKBUILD_CMAKE_DEFINE=${SKBUILD_CMAKE_DEFINE:-CMAKE_CUDA_ARCHITECTURES=90a-real}
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv >"$out/gpus.csv"

# step NAME SECONDS COMMAND...: runs it if it is asked for, within its time and that of all.
step() {
  local name=$1 seconds=$(($2 < end - SECONDS ? $2 : end - SECONDS)) group=${1%%-*} began=$SECONDS code=0
  shift 2
  [[ " ${steps[*]} " == *" $group "* || " ${steps[*]} " == *" $name "* ]] || return 0
  if [[ $seconds -lt 5 ]]; then
    code=124
    echo 'no time is left' >"$out/$name.log"
  else
    timeout -k 10 "$seconds" "$@" >"$out/$name.log" 2>&1 || code=$?
  fi
  echo "$name: exit code $code, $((SECONDS - began)) s; $(tail -n 1 "$out/$name.log")" | tee -a "$out/steps.txt"
}
unisono=("$python" -m unisono)
bench=("${unisono[@]}" bench --device cuda --workload none -d bf16 --mode graph)

step build 180 make build/gpu/.installed PYTHON="$python"
step check-moe 110 "$python" -m pytest -q -m gpu tests/gpu/test_moe.py -n 0 -k "$ranks or wrong"
step check-norm 60 "$python" -m pytest -q -m gpu tests/gpu/test_norm.py -n 0
step check-matmul 75 "$python" -m pytest -q -m gpu tests/gpu/test_torch_matmul.py -n 0
step check-collectives 70 "$python" -m pytest -q -m gpu tests/gpu/test_collectives.py -n 0 -x
if [[ -d ${PEERS:-}/flashinfer ]]; then # on a GPU of its own, if there are several
  CUDA_VISIBLE_DEVICES=$((gpus - 1)) step moe-streams 60 "$python" tools/moe-streams.py --peers "$PEERS" --json "$out/moe-streams.json" &
  [[ $gpus -gt 1 ]] || wait
fi
CUDA_VISIBLE_DEVICES=0 step moe-one 50 "$python" tools/moe-gpu.py --json "$out/moe-one.json"
CUDA_VISIBLE_DEVICES=0 step moe-alone 50 "${bench[@]}" --ranks 1 --moe --hidden 7168 --tokens 128,4096 --budget 20 \
  --layout expert_major --out "$out/moe-alone"
CUDA_VISIBLE_DEVICES=0 step norm-tail 30 "$python" tools/norm-streams.py --ranks 1 --json "$out/norm-tail.json"
CUDA_VISIBLE_DEVICES=0 step norm-streams 40 "$python" tools/norm-streams.py --ranks 2,4,8 --json "$out/norm-streams.json" \
  ${FUSION_PEERS:+--peers "$FUSION_PEERS"}
CUDA_VISIBLE_DEVICES=0 step matmul-one 40 "$python" tools/matmul-gpu.py --json "$out/matmul-one.json"
wait
if [[ $gpus -gt 1 ]]; then
  step moe-bench 90 "${bench[@]}" --ranks "$gpus" --moe --hidden 7168 --tokens 1,16,64,128,1024,4096 --budget 65 \
    --layout expert_major,flat --out "$out/moe-bench"
  step moe-overlap 60 "${unisono[@]}" run -n "$gpus" "$python" tools/moe-overlap.py --json "$out/moe-overlap.json"
  step norm-bench 70 "${bench[@]}" --ranks "$gpus" --norm --hidden 7168 --sizes 14K,56K,224K,1M,3584K,14M,56M --budget 40 \
    --backends unisono,nccl,unisono:apart,unisono:one_shot,unisono:one_shot_ll128,unisono:two_shot,unisono:two_shot_ll128 --out "$out/norm-bench"
  step matmul-all 190 "${bench[@]}" --ranks "$gpus" --matmul --workload llama-3-70b-tp-layer-tokens-8192 --budget 80 --out "$out/matmul-all"
  step moe-all 50 "${unisono[@]}" run -n "$gpus" "$python" tools/moe-gpu.py --json "$out/moe-all.json"
  torchrun=("$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus")
  for form in ddp fsdp; do
    step "train-$form" 50 "${torchrun[@]}" tools/train-step.py --device cuda --form "$form" --batch 32 --rounds 40 \
      --out "$out/train-$form.json"
  done
  step collectives-small 75 "${bench[@]}" --ranks "$gpus" --memory symmetric --collective all_reduce,all_gather,reduce_scatter,all_to_all,send_recv \
    --sizes 1K,16K,256K,1M,16M --budget 35 --out "$out/collectives-small"
  step collectives-large 60 "${bench[@]}" --ranks "$gpus" --memory symmetric --collective all_reduce,all_gather,reduce_scatter,all_to_all,send_recv \
    --sizes 64M,1G --budget 25 --out "$out/collectives-large"
  step collectives-v 40 "${bench[@]}" --ranks "$gpus" --memory plain --collective all_to_all_v --sizes 64K,1M,16M,64M --budget 10 \
    --out "$out/collectives-v"
fi
UNISONO_SOAK=200000 step soak 75 "$python" -m pytest -q -m gpu tests/gpu/test_soak.py -n 0
! grep -qv 'exit code 0' "$out/steps.txt"
