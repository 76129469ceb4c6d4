#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the TensorRT plugins on a machine with a CUDA GPU and runs them there: host test, harness (eager and captured, through
# a real plugin registry), sanitizers.
#
#   scripts/gpu/plugins.sh --wheels DIR [--commit ID] [--out DIR] [--arch LIST] [--steps N] [--only "LIST"]
#
# DIR holds the wheels of kernel-lens 2.0.1 (TensorRT's headers) and tensorrt_lean_cu13_libs 11.4.0.106 (a registry):
#   pip download --no-deps --dest DIR kernel-lens==2.0.1 tensorrt_lean_cu13_libs==11.4.0.106
# LIST: of harness, memcheck, racecheck, initcheck; all by default, side by side.
# Needs nvcc, cmake, ninja and Python 3 with pip; installs nothing outside of the build folder. Writes OUT/plugins.json.
set -euo pipefail
cd "$(dirname "$0")/../.."

commit=$(git describe --always --abbrev=12 --dirty --exclude='*' 2>/dev/null || echo unknown)
wheels= out=build/gpu arch=native steps=1000 parts=4 only="harness memcheck racecheck initcheck"
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels=$2 ;;
    --commit) commit=$2 ;;
    --out) out=$2 ;;
    --arch) arch=$2 ;;
    --steps) steps=$2 ;;
    --only) only=$2 ;;
    *) echo "unknown argument: $1" >&2; exit 2 ;;
  esac
  shift 2
done
[ -n "$wheels" ] || { echo "--wheels: the folder of the two wheels is needed" >&2; exit 2; }

build=build/gpu-plugins
mkdir -p "$out"
python3 -m pip install --quiet --no-index --no-deps --upgrade --target "$build/wheels" "$wheels"/kernel_lens-*.whl \
  "$wheels"/tensorrt_lean_cu13_libs-*.whl
cmake -S . -B "$build" -G Ninja -DREPLAYSSM_CUDA=ON -DREPLAYSSM_BUILD_TESTS=ON -DREPLAYSSM_CUDA_ARCHITECTURES="$arch" \
  -DREPLAYSSM_TENSORRT_INCLUDE_DIR="$PWD/$build/wheels/kernel_lens/include/tensorrt" > "$out/plugins-build.log"
cmake --build "$build" >> "$out/plugins-build.log" 2>&1 || { tail -n 40 "$out/plugins-build.log"; exit 1; }

library=$build/libtrtllm_replayssm_plugins.so
registry=("$build"/wheels/tensorrt_lean_libs/libnvinfer_lean.so.*)
"$build/plugin_test" "$library"

declare -A running
start() {  # NAME COMMAND...: in the background, its output in OUT/plugins-NAME.log
  local name=$1
  shift
  timeout 580 "$@" > "$out/plugins-$name.log" &
  running[$name]=$!
}

case " $only " in *" harness "*)
  for part in $(seq 0 $((parts - 1))); do  # the host has more to do than the GPU
    start "$part" "$build/plugin_harness" "$library" --registry "$PWD/${registry[0]}" --steps "$steps" \
      --commit "$commit" --part "$part/$parts" --output "$build/part-$part.json"
  done
esac
for tool in memcheck racecheck initcheck; do
  case " $only " in *" $tool "*)
    start $tool compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 5 \
      "$build/plugin_harness" "$library" --quick --few 24 --steps 25
  esac
done
status=0
for name in "${!running[@]}"; do
  code=0
  wait "${running[$name]}" || code=$?
  echo "== $name: exit code $code"
  if [ "$code" = 0 ]; then tail -n 2 "$out/plugins-$name.log"; else tail -n 40 "$out/plugins-$name.log"; status=1; fi
done
[ $status = 0 ] || exit 1
case " $only " in *" harness "*)
  python3 - "$build" "$parts" "$out/plugins.json" <<'MERGE'
import json, sys

build, parts, output = sys.argv[1], int(sys.argv[2]), sys.argv[3]
runs = [json.load(open(f"{build}/part-{part}.json")) for part in range(parts)]
total = sum(len(run["cases"]) for run in runs)
cases = [runs[index % parts]["cases"][index // parts] for index in range(total)]
head = json.dumps(runs[0] | {"cases": []}, indent=1).removesuffix("[]\n}")
with open(output, "w") as file:
    file.write(head + "[\n  " + ",\n  ".join(map(json.dumps, cases)) + "\n ]\n}\n")
print(f"{total} cases, all the same bits")
MERGE
esac
