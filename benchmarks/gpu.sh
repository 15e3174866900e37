#!/usr/bin/env bash
# Everything that needs a GPU, on a machine that has one and torch, and maybe no network: builds in place with PYTHON,
# installs nothing (wheels in .whl/ are unpacked to a throw-away folder), and writes to the folder named by $1, as it goes:
#   summary.json  hardware, versions, and one entry a stage: ok, failed, out of time, absent; seconds; the last lines
#   build.log tests.log memcheck.log racecheck.log
#   checks.json     what tests and sanitizers said in the end
#   kernels.json steps.json large.json pool.json families.json (a list of results)
#   peers.json batch.json   operators and steps beside Liger-Kernel, if its wheel lies in .whl/ or the machine has it; the
#                           largest batches in 40 GiB
#   models.json             models of libraries that the machine has, stock and swapped
# A stage that fails does not stop the next; the exit status is 1 if any failed. BUDGET seconds in all.
# STAGES="NAME..." leaves out the others but the build; QUICK=1 takes fewer steps, and no compiled ones.
set -uo pipefail

OUT=$(mkdir -p "${1:?usage: benchmarks/gpu.sh OUT}" && cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-530}
SECONDS=0
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
failed=0

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export NVCC_APPEND_FLAGS=-lineinfo # for the sanitizers
if compgen -G '.whl/*.whl' >/dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$SCRATCH/site" .whl/*.whl &&
    export PYTHONPATH="$PYTHONPATH:$SCRATCH/site" # behind: what the machine has wins
fi

# summary STAGE NAME VALUE...: writes into summary.json. STAGE . is the file as a whole; VALUE is JSON, or @LOG for its end.
summary() {
  "$PYTHON" - "$OUT/summary.json" "$@" <<'PY'
import fcntl, json, pathlib, sys
file, stage, *pairs = sys.argv[1:]
path = pathlib.Path(file)
lock = path.open("a")
fcntl.flock(lock, fcntl.LOCK_EX)  # stages may run side by side
whole = json.loads(path.read_text() or "{}")
entry = whole if stage == "." else whole.setdefault("stages", {}).setdefault(stage, {})
for name, value in zip(pairs[::2], pairs[1::2], strict=True):
    if value.startswith("@"):
        log = pathlib.Path(value[1:])
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        entry[name] = [line[:300] for line in lines[-15:]]
    else:
        entry[name] = json.loads(value)
path.write_text(json.dumps(whole, indent=2) + "\n")
PY
}

# stage NAME LIMIT LOG COMMAND...: runs COMMAND for at most LIMIT seconds or what is left of BUDGET. It is then interrupted, so
# that pytest still says what has failed, and a benchmark writes what it has measured.
stage() {
  local name=$1 limit=$2 log=$3 left=$((BUDGET - SECONDS)) start=$SECONDS took status=0 word=ok
  shift 3
  [[ -z "${STAGES:-}" || " build $STAGES " == *" $name "* ]] || return 0
  [ "$limit" -lt "$left" ] || limit=$left
  if [ "$limit" -lt 10 ]; then
    echo "$name: not started, ${BUDGET} s are used up" | tee -a "$log"
    status=124
  else
    timeout -s INT -k 15 "$limit" "$@" </dev/null 2>&1 | tee -a "$log" || status=${PIPESTATUS[0]}
  fi
  took=$((SECONDS - start))
  [ "$status" = 0 ] || { failed=1 && word=failed; }
  [ "$status" != 124 ] && [ "$status" != 137 ] || word="out of time"
  summary "$name" result "\"$word\"" exit "$status" seconds "$took" tail "@$log"
  echo "== $name: $word ($took s)"
  return "$status"
}

rm -f "$OUT"/{summary,checks,kernels,steps,large,batch,pool,peers,families,models}.json "$OUT"/{build,tests,memcheck,racecheck}.log

"$PYTHON" - >"$SCRATCH/machine.json" 2>"$SCRATCH/machine.log" <<'PY'
import json, platform, subprocess, torch

def ask(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        return ""

there = torch.cuda.is_available()
print(json.dumps({
    "gpu": torch.cuda.get_device_name() if there else None,
    "capability": "%d.%d" % torch.cuda.get_device_capability() if there else None,
    "memory_bytes": torch.cuda.get_device_properties(0).total_memory if there else None,
    "driver": ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    "torch": torch.__version__,
    "torch_cuda": torch.version.cuda,
    "nvcc": ask("nvcc", "--version").split("release ")[-1].split(",")[0],
    "python": platform.python_version(),
    "cpu_cores": len(__import__("os").sched_getaffinity(0)),
}))
PY
machine=$(cat "$SCRATCH/machine.json")
commit=${MEMKIT_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)} # of a copy without its history: as given
summary . machine "${machine:-null}" commit "\"$commit\"" date "\"$(date -u +%Y-%m-%dT%H:%M:%SZ)\""
capability=$("$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["capability"] or "")' <<<"$machine" 2>/dev/null)
if [ -z "$capability" ]; then
  cat "$SCRATCH/machine.log"
  echo "gpu.sh: $PYTHON has no torch that sees a CUDA device" | tee "$OUT/build.log"
  summary build result '"failed"' exit 1 tail "@$OUT/build.log"
  exit 1
fi
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$capability} MEMKIT_CUDA=1

if stage build 240 "$OUT/build.log" "$PYTHON" setup.py -q build_ext --inplace; then
  if "$PYTHON" -c 'import pytest' 2>/dev/null; then
    pytest=("$PYTHON" -m pytest -q -p no:cacheprovider)
    parallel=()
    # The sanitizers and what tests compile take the other cores.
    if "$PYTHON" -c 'import xdist' 2>/dev/null; then parallel=(-n $((($(nproc) * 3 + 3) / 4)) --dist worksteal); fi
    # Not those that need a package for tests of PyTorch's own.
    mapfile -t with_cuda < <(grep -l device tests/test_*.py | xargs grep -L sharding_cases)
    # Side by side: none of these is timed, and a sanitizer leaves most of the machine idle. Under it each tensor is its own
    # cudaMalloc: behind the caching allocator a write past the end lands in a neighbour unseen. PyTorch's kernels go unchecked.
    for tool in memcheck racecheck; do
      stage $tool 130 "$OUT/$tool.log" env OMP_NUM_THREADS=2 PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        compute-sanitizer --tool $tool --kernel-name kns=memkit --error-exitcode 99 "${pytest[@]}" -m sanitize tests/test_cuda_short.py \
        >"$SCRATCH/$tool.out" &
    done
    stage tests_cuda 130 "$OUT/tests.log" env OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=1 \
      "${pytest[@]}" "${parallel[@]}" --tb=short --durations=12 -m "cuda and not slow and not alone" "${with_cuda[@]}"
    wait
    cat "$SCRATCH"/{memcheck,racecheck}.out
    stage tests_alone 30 "$OUT/tests.log" "${pytest[@]}" -m "cuda and not slow and alone" "${with_cuda[@]}"
  else
    stage tests_cuda 10 "$OUT/tests.log" sh -c \
      'echo "pytest is missing: put its wheels (pytest, pluggy, iniconfig, packaging) into .whl/"; exit 127'
  fi
  stage kernels 90 "$SCRATCH/kernels.log" "$PYTHON" benchmarks/bench_activation.py --device cuda --sizes 1Mi,32Mi \
    --no-compile --json "$OUT/kernels.json"
  stage pool 60 "$SCRATCH/pool.log" "$PYTHON" benchmarks/bench_pool.py --device cuda --rounds 5 --json "$OUT/pool.json"
  for each in loss optim; do
    stage $each 25 "$SCRATCH/$each.log" "$PYTHON" benchmarks/bench_$each.py --device cuda --quick --json "$SCRATCH/$each.json"
  done
  stage steps 120 "$SCRATCH/steps.log" "$PYTHON" -m memkit.cli bench --device cuda \
    ${QUICK:+--steps 8 --variants eager,memkit} --json "$OUT/steps.json"
  # 350 million parameters
  stage large 90 "$SCRATCH/large.log" "$PYTHON" -m memkit.cli bench --device cuda --model gpt --variants eager,memkit \
    --dtype bfloat16 --layers 24 --d-model 1024 --heads 16 --seq-len 2048 --batch 4 --vocab 32768 --steps 10 \
    --json "$OUT/large.json"
  stage ops 140 "$SCRATCH/ops.log" "$PYTHON" benchmarks/bench_ops.py --device cuda --sizes 1Mi,32Mi \
    --dtypes float32,bfloat16 --no-compile --quick --json "$SCRATCH/ops.json"
  stage peers 70 "$SCRATCH/peers.log" "$PYTHON" benchmarks/bench_peers.py --device cuda --quick --no-compile \
    --json "$OUT/peers.json"
  stage batch 120 "$SCRATCH/batch.log" "$PYTHON" benchmarks/bench_steps.py --device cuda --quick --no-compile \
    --json "$OUT/batch.json"
  stage models 300 "$SCRATCH/models.log" "$PYTHON" benchmarks/bench_models.py --device cuda --json "$OUT/models.json"
  "$PYTHON" - "$OUT/families.json" "$SCRATCH"/{ops,loss,optim}.json <<'PY'
import json, pathlib, sys
out, *parts = map(pathlib.Path, sys.argv[1:])
out.write_text(json.dumps([json.loads(part.read_text()) for part in parts if part.exists()], indent=1) + "\n")
PY
  # Last: what a machine without a GPU has tested already.
  if [ -n "${pytest:-}" ]; then
    stage tests_cpu 120 "$OUT/tests.log" "${pytest[@]}" -m "not cuda and not slow"
  fi
fi
"$PYTHON" - "$OUT" <<'PY'
import json, pathlib, re, sys
out = pathlib.Path(sys.argv[1])
whole = json.loads((out / "summary.json").read_text())
machine = whole["machine"]
said = {}
for stage, entry in whole.get("stages", {}).items():
    if not stage.startswith(("tests", "memcheck", "racecheck")):
        continue
    lines = [re.sub("=", "", line).strip() for line in entry.get("tail", [])]
    found = [line for line in lines if re.match(r"\d+ (passed|failed)|ERROR SUMMARY|RACECHECK SUMMARY", line)]
    said[stage] = found or [entry["result"]]
checks = {
    "kind": "memkit-checks",
    "hardware": {"device": "cuda", **{k: machine[k] for k in ("gpu", "driver")}},
    "versions": {k: machine[k] for k in ("torch", "nvcc", "python")},
    "date": whole["date"],
    "commit": whole["commit"],
    "said": said,
}
(out / "checks.json").write_text(json.dumps(checks, indent=1) + "\n")
PY
grep -q '"result": "\(failed\|out of time\)"' "$OUT/summary.json" && failed=1
summary . seconds "$SECONDS" ok "$([ "$failed" = 0 ] && echo true || echo false)"
exit "$failed"
