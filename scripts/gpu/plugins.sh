#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the TensorRT plugins on a machine with a CUDA GPU and runs them there: host test, harness (eager and captured, through
# a real plugin registry), sanitizers.
#
#   scripts/gpu/plugins.sh --wheels DIR | --prebuilt DIR [--commit ID] [--out DIR] [--arch LIST] [--steps N] [--threads N]
#                          [--only "LIST"] [--part I/N]
#
# --wheels: the wheels of kernel-lens 2.0.1 (TensorRT's headers) and tensorrt_lean_cu13_libs 11.4.0.106 (a registry):
#   pip download --no-deps --dest DIR kernel-lens==2.0.1 tensorrt_lean_cu13_libs==11.4.0.106
# --prebuilt: plugin_test, plugin_harness, libtrtllm_replayssm_plugins.so (built elsewhere, for this GPU) and
#   libnvinfer_lean.so.* (of the second wheel).
# LIST: of harness, memcheck, racecheck, initcheck; all by default. I/N: every Nth case of each, from I on.
# Building needs nvcc, cmake, ninja and Python 3 with pip; nothing is installed outside of the build folder.
# Writes OUT/plugins.json, and OUT/plugins-TOOL.json for each sanitizer that found nothing in any case.
set -euo pipefail
cd "$(dirname "$0")/../.."

commit=$(git describe --always --abbrev=12 --dirty --exclude='*' 2>/dev/null || echo unknown)
wheels= prebuilt= out=build/gpu arch=native steps=1000 threads=8 part=0/1 only="harness memcheck racecheck initcheck"
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels=$2 ;;
    --prebuilt) prebuilt=$2 ;;
    --commit) commit=$2 ;;
    --out) out=$2 ;;
    --arch) arch=$2 ;;
    --steps) steps=$2 ;;
    --threads) threads=$2 ;;
    --only) only=$2 ;;
    --part) part=$2 ;;
    *) echo "unknown argument: $1" >&2; exit 2 ;;
  esac
  shift 2
done
mkdir -p "$out"

if [ -n "$prebuilt" ]; then
  build=$prebuilt
  registry=("$build"/libnvinfer_lean.so.*)
elif [ -n "$wheels" ]; then
  build=build/gpu-plugins
  python3 -m pip install --quiet --no-index --no-deps --upgrade --target "$build/wheels" "$wheels"/kernel_lens-*.whl \
    "$wheels"/tensorrt_lean_cu13_libs-*.whl
  cmake -S . -B "$build" -G Ninja -DREPLAYSSM_CUDA=ON -DREPLAYSSM_BUILD_TESTS=ON -DREPLAYSSM_CUDA_ARCHITECTURES="$arch" \
    -DREPLAYSSM_TENSORRT_INCLUDE_DIR="$PWD/$build/wheels/kernel_lens/include/tensorrt" > "$out/plugins-build.log"
  cmake --build "$build" >> "$out/plugins-build.log" 2>&1 || { tail -n 40 "$out/plugins-build.log"; exit 1; }
  registry=("$build"/wheels/tensorrt_lean_libs/libnvinfer_lean.so.*)
else
  echo "--wheels or --prebuilt: the folder of the two wheels, or of what was built elsewhere, is needed" >&2
  exit 2
fi
library=$build/libtrtllm_replayssm_plugins.so
"$build/plugin_test" "$library"

# One after the other: processes that share a GPU wait for each other at every synchronisation.
status=0
check() {  # NAME COMMAND...: its output in OUT/NAME.log, its record in OUT/NAME.json
  local name=$1 code=0 command="scripts/gpu/plugins.sh --only $tool --threads $threads --part $part"
  shift
  if [ "$tool" = harness ]; then command="$command --steps $steps"; fi
  timeout 580 "$@" --threads "$threads" --part "$part" --commit "$commit" --command "$command" \
    --output "$out/$name.unchecked" > "$out/$name.log" || code=$?
  echo "== $name: exit code $code after $SECONDS s"
  if [ "$code" = 0 ]; then
    mv "$out/$name.unchecked" "$out/$name.json"
    tail -n 2 "$out/$name.log"
  else
    tail -n 40 "$out/$name.log"
    status=1
  fi
}
for tool in $only; do
  if [ "$tool" = harness ]; then
    check plugins "$build/plugin_harness" "$library" --registry "${registry[0]}" --steps "$steps"
  else
    check "plugins-$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 \
      "$build/plugin_harness" "$library" --quick --steps 32
  fi
done
exit $status
