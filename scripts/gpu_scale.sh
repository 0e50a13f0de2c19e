#!/usr/bin/env bash
# Measures how Perdure scales over the GPUs of one host: five parts, each with a time limit.
#
#   scripts/gpu_scale.sh 4                      every part on 4 GPUs, in less than ten minutes
#   scripts/gpu_scale.sh 8 trainer engines      these parts; results of others in OUT are kept
#   scripts/gpu_scale.sh --cpu 2                two trainer processes and two engines on a CPU
#
#   trainer      1, 2, 4 ranks: tokens/s, MFU, efficiency, memory, losses against one rank's
#   engines      several behind the router against one alone; a tensor-parallel one (GPUs only)
#   publication  from the trainer's ranks to 1, 2, 4 engines: seconds, bytes/s, version, digest
#   async        30 updates, half of the GPUs train and half sample; this run goes on for kill
#   kill         SIGKILL of an engine and of a trainer rank: seconds to go on, audit
#   colocated    the same collections in turns on all GPUs
#
# The rows for benchmarks/RESULTS.md and the table of goals are printed at the end and are in
# OUT/rows.md. Exit code 0 only if every part passed and every goal holds, 2 for wrong arguments.
#
# Set by the user, all optional:
#   OUT=runs/gpu-scale        logs, a JSON file for each part, rows.md, summary.txt
#   PERDURE_PYTHON=python3    the interpreter; on a bare machine the one that has torch
#   PERDURE_SITE=~/site       a folder of packages (pip --target) for a machine without an index
#   PERDURE_SCALE_PROFILE=    1: time lines of the trainers' updates, printed, and in OUT/timelines
#   PERDURE_SCALE_LIMIT_S=585 for everything (with --cpu 1800); parts that no time is left for are
#                             not begun
set -uo pipefail
cd "$(dirname "$0")/.."

parts=(trainer engines publication async kill colocated)
declare -A limit_s=(
  [trainer]=190 [engines]=170 [publication]=190 [async]=210 [kill]=170 [colocated]=150
)
# No part is worth beginning with less.
least_s=20

usage() {
  echo "$1" >&2
  echo "usage: scripts/gpu_scale.sh [--cpu] 2|4|8 [PART...]; parts: ${parts[*]}" >&2
  exit 2
}

cpu=()
if [ "${1:-}" = --cpu ]; then
  cpu=(--cpu)
  shift
fi
gpus=${1:-}
[ $# -gt 0 ] && shift
case "$gpus" in
  2) ;;
  4 | 8) [ ${#cpu[@]} -eq 0 ] || usage "--cpu runs with two processes, not $gpus" ;;
  *) usage "how many GPUs: 2, 4 or 8, not '$gpus'" ;;
esac
for part in "$@"; do
  [ -n "${limit_s[$part]:-}" ] || usage "no part '$part'"
done
if [ ${#cpu[@]} -eq 0 ]; then
  seen=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | wc -l)
  [ "$seen" -ge "$gpus" ] || usage "$gpus GPUs are asked for, $seen are there"
else
  export CUDA_VISIBLE_DEVICES=
  # A few minutes when the machine does nothing else, and more when it does.
  for part in "${parts[@]}"; do limit_s[$part]=$((3 * limit_s[$part])); done
  PERDURE_SCALE_LIMIT_S=${PERDURE_SCALE_LIMIT_S:-1800}
fi
[ $# -gt 0 ] || set -- "${parts[@]}"

out=$(mkdir -p "${OUT:-runs/gpu-scale}" && cd "${OUT:-runs/gpu-scale}" && pwd)
python=${PERDURE_PYTHON:-python3}
site=${PERDURE_SITE:-$HOME/site}
work=${TMPDIR:-/tmp}/perdure-gpu-scale-$$
end=$((SECONDS + ${PERDURE_SCALE_LIMIT_S:-585}))

if [ -d "$site" ]; then
  export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH
else
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
fi
# Multicast over NVLink can put the GPUs of a host out of service; with NCCL_CUMEM_ENABLE a broadcast
# to SGLang fails.
export NCCL_NVLS_ENABLE=0 NCCL_CUMEM_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export PERDURE_STATE_DIR=$work/state PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
PERDURE_SGLANG_PYTHON=${PERDURE_SGLANG_PYTHON:-$(command -v "$python")}
export PERDURE_SGLANG_PYTHON
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT

# The command of a part, which may take so many seconds.
command_of() {
  local common=(--gpus "$gpus" --out "$out/$1.json")
  case "$1" in
    trainer)
      command=("$python" benchmarks/scaling_trainer.py "${common[@]}" "${cpu[@]}" --budget-s "$2")
      [ -z "${PERDURE_SCALE_PROFILE:-}" ] || command+=(--profile "$out/timelines")
      ;;
    engines)
      command=("$python" benchmarks/scaling_engines.py "${common[@]}" --work "$work/engines")
      [ ${#cpu[@]} -eq 0 ] || command+=(--device cpu)
      ;;
    *)
      command=("$python" benchmarks/scaling_runs.py "$1" "${common[@]}" "${cpu[@]}"
        --work "$work/runs" --budget-s "$2")
      ;;
  esac
}

run_part() {
  local started=$SECONDS left=$((end - SECONDS)) limit=${limit_s[$1]} code
  [ "$left" -ge "$limit" ] || limit=$left
  echo "== $1"
  rm -f "$out/$1.json"
  if [ "$limit" -lt $least_s ]; then
    printf '%-12s NOT RUN: no time left\n' "$1" | tee -a "$out/summary.txt"
    return 1
  fi
  command_of "$1" $((limit - 10))
  timeout --kill-after=10 "$limit" "${command[@]}" 2>&1 | tee "$out/$1.log"
  code=${PIPESTATUS[0]}
  printf '%-12s %s in %d s\n' "$1" "$([ "$code" = 0 ] && echo passed || echo "FAILED ($code)")" \
    $((SECONDS - started)) | tee -a "$out/summary.txt"
  return "$code"
}

# What the runs wrote, without weights and samples.
collect() {
  (cd "$work" && find . -path ./state -prune -o -type f \
    \( -name '*.jsonl' -o -name '*.json' -o -path '*/logs/*' -o -name '*.log' \) -size -4M \
    -not -path '*/prepared/*' -print0 | tar -czf "$out/runs.tar.gz" --null --files-from=-)
}

failed=0
: >"$out/summary.txt"
echo "load before: $(cut -d' ' -f1-3 /proc/loadavg)" | tee -a "$out/summary.txt"
for part in "$@"; do run_part "$part" || failed=1; done
"$python" -m workers down || failed=1
collect
echo "load after: $(cut -d' ' -f1-3 /proc/loadavg)" | tee -a "$out/summary.txt"
if [ ${#cpu[@]} -eq 0 ]; then
  nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv | tee -a "$out/summary.txt"
fi
"$python" benchmarks/scaling_goals.py "$out" 2>&1 | tee "$out/rows.md"
[ "${PIPESTATUS[0]}" = 0 ] || failed=1
cat "$out/summary.txt"
exit $failed
