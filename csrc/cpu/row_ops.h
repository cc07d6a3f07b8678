// SPDX-License-Identifier: Apache-2.0
// Norms, gates and rotations of one row or head of bfloat16 numbers, for kernels that are made of
// several. They only call functions for several instruction sets, which GCC 12 would export.
#pragma once

#include <cstdint>

namespace specplug {

constexpr int64_t kMostHeadSize = 1024;

// sum = x + delta, out = sum / rms(sum) * weight, over n numbers; without delta, sum is x. sum or
// out may be x.
void norm_row(const uint16_t* x, const uint16_t* delta, const uint16_t* weight, int64_t n,
              float eps, uint16_t* sum, uint16_t* out);

// out [n] = silu(x[0..n)) * x[n..2n).
void gate_row(const uint16_t* x, int64_t n, uint16_t* out);

// out [n] += x [n].
void add_row(const uint16_t* x, int64_t n, uint16_t* out);

// x [dim] / rms(x) * weight, the halves of its first `turned` numbers turned by cos and sin
// [turned], where sin is negative in its first half. dim, at most kMostHeadSize, and turned / 2 are
// multiples of 16. out may be x.
void norm_and_turn_head(const uint16_t* x, const uint16_t* weight, float eps, const uint16_t* cos,
                        const uint16_t* sin, int64_t dim, int64_t turned, uint16_t* out);

}  // namespace specplug
