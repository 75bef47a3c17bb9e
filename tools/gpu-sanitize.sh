#!/usr/bin/env bash
# Runs every collective, by every algorithm, norms, mixture of experts and fused matmuls under compute-sanitizer, and
# checks the results.
# Ranks are processes, with peer access and through host memory. If there are fewer GPUs than ranks, the ranks share one.
#   gpu-sanitize.sh [TOOL ...]   memcheck racecheck synccheck initcheck, or those named
# Variables: PYTHON, which has unisono (PYTHONPATH); RANKS (2); LIMIT_S of a run (240); AREAS, those of
# tests/support/gpu_sanitized.py; PEER_ACCESS ("1 0").
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $# -gt 0 ]] || set -- memcheck racecheck synccheck initcheck
read -ra areas <<<"${AREAS:-}"
python=${PYTHON:-python3} ranks=${RANKS:-2} limit_s=${LIMIT_S:-240}
sanitizer=$(command -v compute-sanitizer || compgen -G '/usr/local/cuda*/bin/compute-sanitizer' | head -n 1) || {
  echo 'gpu-sanitize: there is no compute-sanitizer here: it comes with the CUDA toolkit.' >&2
  exit 2
}
# takes the option's name that this version knows; kernels of other libraries are left out
[[ $("$sanitizer" --help) == *--kernel-name* ]] && filter=--kernel-name || filter=--kernel-regex
export UNISONO_SHARE_DEVICE=1 UNISONO_TIMEOUT_S=$limit_s UNISONO_CHECK=0
export PYTHONPATH="$PWD/tests/support:$PWD/tests/contract:${PYTHONPATH:-}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT

failed=0
for tool in "$@"; do
  these=("${areas[@]}")
  # racecheck ends torch.mm with an error of its own
  [[ $tool == racecheck && ${#areas[@]} -eq 0 ]] && these=(collectives norms experts)
  for peer_access in ${PEER_ACCESS:-1 0}; do
    began=$SECONDS
    code=0
    UNISONO_PEER_ACCESS=$peer_access timeout -k 10 "$limit_s" "$sanitizer" --tool "$tool" --target-processes all \
      --error-exitcode 9 --report-api-errors no --print-limit 20 "$filter" kns=unisono \
      "$python" -m unisono run -n "$ranks" "$python" tests/support/gpu_sanitized.py "${these[@]}" >"$log" 2>&1 || code=$?
    if [[ $code -ne 0 ]]; then
      failed=1
      tail -n 100 "$log"
    fi
    echo "$tool, peer access $peer_access: exit code $code, $((SECONDS - began)) s; calls and summaries:"
    grep -E 'SUMMARY|calls,' "$log" || true
  done
done
exit $failed
