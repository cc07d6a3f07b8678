# SPDX-License-Identifier: Apache-2.0
"""Concepts of the CuTe DSL kernels, one a file; importing any but `config` needs cutlass."""
