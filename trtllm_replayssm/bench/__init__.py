# SPDX-License-Identifier: Apache-2.0
"""Measurements of speed: `trtllm-replayssm bench kernel`, `bench step`, `bench serve` (docs/measuring.md).

`kernel` times the ops of one Mamba-2 layer beside the conventional kernels and those of other libraries (`peers`),
`step` a whole decode step of a model, `serve` a stream of requests; the latter two run the embedded runtime on weights
of a checkpoint or random ones (`subject`). `Records` keeps what was measured, case by case.
"""
