# SPDX-License-Identifier: Apache-2.0
"""What other systems need to run ReplaySSM: a module for each."""
