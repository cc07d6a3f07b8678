// SPDX-License-Identifier: Apache-2.0
// Products with packed int8 weights, for kernels that are made of several.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace specplug {

// A weight [N, K] as `pack_int8` leaves it.
struct Int8Product {
  const char* weight;
  const int32_t* column_sums;  // [N]
  const float* column_scales;  // [N]
  const uint16_t* bias;        // [N], or null
  int64_t columns, depth;      // N, K
};

// Throws where the tensors are not those of a weight [columns, depth], or the CPU lacks AVX-512
// VNNI.
Int8Product int8_product(const torch::stable::Tensor& packed,
                         const torch::stable::Tensor& column_sums,
                         const torch::stable::Tensor& column_scales,
                         const std::optional<torch::stable::Tensor>& bias, int64_t columns,
                         int64_t depth);

// out [rows, N] = x [rows, K], rows of x `x_stride` numbers apart. A row of x is rounded to 127ths
// of its largest magnitude; out may not overlap x.
void multiply_int8(const Int8Product& product, const uint16_t* x, int64_t rows, int64_t x_stride,
                   uint16_t* out);

}  // namespace specplug
