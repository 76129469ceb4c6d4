# SPDX-License-Identifier: Apache-2.0
"""One room for each outside system."""
