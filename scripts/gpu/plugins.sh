#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the TensorRT plugins on a machine with a CUDA GPU and runs them there: host test, harness (eager and captured, through
# a real plugin registry), sanitizers.
#
#   scripts/gpu/plugins.sh --wheels DIR [--commit ID] [--out DIR] [--arch LIST] [--steps N] [--only "LIST"] [--part I/N]
#
# DIR holds the wheels of kernel-lens 2.0.1 (TensorRT's headers) and tensorrt_lean_cu13_libs 11.4.0.106 (a registry):
#   pip download --no-deps --dest DIR kernel-lens==2.0.1 tensorrt_lean_cu13_libs==11.4.0.106
# LIST: of harness, memcheck, racecheck, initcheck; all by default. I/N: every Nth case of each, from I on.
# Needs nvcc, cmake, ninja and Python 3 with pip; installs nothing outside of the build folder. Writes OUT/plugins.json.
set -euo pipefail
cd "$(dirname "$0")/../.."

commit=$(git describe --always --abbrev=12 --dirty --exclude='*' 2>/dev/null || echo unknown)
wheels= out=build/gpu arch=native steps=1000 part=0/1 only="harness memcheck racecheck initcheck"
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels=$2 ;;
    --commit) commit=$2 ;;
    --out) out=$2 ;;
    --arch) arch=$2 ;;
    --steps) steps=$2 ;;
    --only) only=$2 ;;
    --part) part=$2 ;;
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

# One after the other: processes that share a GPU wait for each other at every synchronisation.
status=0
check() {  # NAME COMMAND...: its output in OUT/NAME.log
  local name=$1 code=0
  shift
  timeout 580 "$@" > "$out/$name.log" || code=$?
  echo "== $name: exit code $code after $SECONDS s"
  if [ "$code" = 0 ]; then tail -n 1 "$out/$name.log"; else tail -n 40 "$out/$name.log"; status=1; fi
}
for name in $only; do
  if [ "$name" = harness ]; then
    check plugins "$build/plugin_harness" "$library" --registry "$PWD/${registry[0]}" --steps "$steps" --part "$part" \
      --commit "$commit" --output "$out/plugins.json"
  else
    check "plugins-$name" compute-sanitizer --tool "$name" --error-exitcode 9 --print-limit 5 \
      "$build/plugin_harness" "$library" --quick --few 24 --steps 25 --part "$part"
  fi
done
exit $status
