#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs tritonserver, from nvidia-pytriton's wheel, for the tests: scripts/triton_server.sh VENV/bin/python
#
# Its Python backend reads numbers wrong under numpy 2. So it gets an environment of its own, VENV/triton-server, with
# numpy 1 in front of what VENV has.
set -euo pipefail
base=$1
own=$("$base" -c 'import sys; print(sys.prefix)')/triton-server
test ! -e "$own/complete" || exit 0
rm -rf "$own"
"$base" -m venv "$own"
"$own/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps \
    --constraint "$(dirname "$0")/../constraints.txt" nvidia-pytriton "numpy<2"
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
echo "import site; site.addsitedir('$("$base" -c "$packages")')" > "$("$own/bin/python" -c "$packages")/base.pth"
touch "$own/complete"
