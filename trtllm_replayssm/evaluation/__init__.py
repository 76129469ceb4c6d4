# SPDX-License-Identifier: Apache-2.0
"""Measurements of what state formats do to a model: `trtllm-replayssm eval`.

    from trtllm_replayssm.evaluation.drift import Drift

`Subject` is a checkpoint loaded once, `Decoder` decodes the rows in one configuration, and
`Drift` compares configurations with FP32 states along the text.
"""
