# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels that a step of vLLM's V2 model runner launches, for CPUs without Triton.

One function per kernel, with the kernel's own parameters, in NumPy where tensors are small and in
torch where they are as wide as the vocabulary. Integers, token ids and noise equal the kernel's bit
for bit, as Triton's interpreter computes them.
"""
