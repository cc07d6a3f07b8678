# SPDX-License-Identifier: Apache-2.0
"""Measuring against plain vLLM: servers, load, tree columns, reports.

A thin layer over `vllm serve` and `vllm bench serve`, driven as subprocesses and over HTTP.
"""
