#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds, tests, sanitizes and benchmarks on a machine with a CUDA GPU, in one go.
#
#   scripts/gpu/test.sh [--commit ID] [--out DIR] [--arch LIST] [--steps build,test,sanitize,bench]
#
# Needs Python 3.10+ with torch (CUDA), transformers, pytest, pytest-timeout, hypothesis, scikit-build-core, nanobind,
# ninja, and nvcc; installs nothing but this package (editable, into the Python that runs). Writes DIR/gpu-tests.json (what
# ran, on which GPU, and how it ended), DIR/kernel.json and DIR/verify.json (the benchmarks) and the logs.
set -uo pipefail
cd "$(dirname "$0")/../.."

commit=$(git describe --always --abbrev=12 --dirty --exclude='*' 2>/dev/null || echo unknown)
out=build/gpu
arch=native
steps=build,test,sanitize,bench
while [ $# -gt 0 ]; do
  case "$1" in
    --commit) commit=$2 ;;
    --out) out=$2 ;;
    --arch) arch=$2 ;;
    --steps) steps=$2 ;;
    *) echo "unknown argument: $1" >&2; exit 2 ;;
  esac
  shift 2
done
for step in ${steps//,/ }; do
  case "$step" in build|test|sanitize|bench) ;; *) echo "unknown step: $step (build, test, sanitize, bench)" >&2; exit 2 ;; esac
done
mkdir -p "$out"
rm -f "$out"/*.log "$out"/*.json
declare -A result

# stage NAME COMMAND...: runs a wanted stage, keeps its log, shows its end, records its exit code and seconds.
stage() {
  local name=$1 start=$SECONDS
  shift
  case ",$steps," in *",${name%%-*},"*) ;; *) return 0 ;; esac
  echo "== $name: $*"
  "$@" > "$out/$name.log" 2>&1
  local rc=$?
  tail -n "${TAIL:-4}" "$out/$name.log"
  result[$name]="{\"exit\": $rc, \"seconds\": $((SECONDS - start)), \"command\": \"${*//"$out/"/}\"}"
  echo "== $name: exit $rc after $((SECONDS - start)) s"
  return $rc
}

TAIL=3 stage build python3 -m pip install --quiet --no-build-isolation --no-deps --no-index \
  --config-settings=build-dir=build/gpu-python \
  --config-settings=cmake.define.REPLAYSSM_CUDA=ON \
  --config-settings=cmake.define.REPLAYSSM_CUDA_ARCHITECTURES="$arch" --editable . || { tail -n 40 "$out/build.log"; exit 1; }

workers=$(python3 -c "import xdist" 2>/dev/null && echo "-n $(( $(nproc) - 2 ))" || true)
# shellcheck disable=SC2086
TAIL=25 stage test python3 -m pytest tests -m gpu -p no:cacheprovider -q $workers --timeout 300
bench="python3 -m trtllm_replayssm bench"
# shellcheck disable=SC2086
TAIL=20 stage bench $bench kernel --geometry super --batches 1 32 256 --no-plot --commit "$commit" \
  --output "$out/kernel.json"
# shellcheck disable=SC2086
TAIL=40 stage bench-verify $bench kernel --geometry super nano4b --batches 128 256 --tokens 1 2 4 8 --steps 64 \
  --repeats 3 --no-plot --commit "$commit" --output "$out/verify.json"
# Without torch's caching every tensor is an allocation of its own, and an access beyond it an error.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool in memcheck racecheck initcheck; do
  TAIL=3 stage "sanitize-$tool" timeout 240 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 \
    python3 scripts/gpu/every_op.py
done

RESULTS=$(for name in "${!result[@]}"; do printf '"%s": %s,' "$name" "${result[$name]}"; done) \
COMMIT=$commit python3 - "$out" <<'PYTHON'
import datetime, json, os, pathlib, re, sys, torch
out = pathlib.Path(sys.argv[1])
stages = json.loads("{" + os.environ["RESULTS"].rstrip(",") + "}")
summary = (out / "test.log").read_text().strip().splitlines()[-1] if (out / "test.log").exists() else None
record = {
    "bench": "gpu-tests", "gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(),
    "commit": os.environ["COMMIT"], "torch": torch.__version__, "pytest": summary, "stages": stages,
    "command": "scripts/gpu/test.sh",
}
(out / "gpu-tests.json").write_text(json.dumps(record, indent=1) + "\n")
sys.exit(any(stage["exit"] for stage in stages.values()))
PYTHON
