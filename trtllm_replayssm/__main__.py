# SPDX-License-Identifier: Apache-2.0
"""`python -m trtllm_replayssm` is the command `trtllm-replayssm`."""

import sys

from .cli import main

sys.exit(main())
