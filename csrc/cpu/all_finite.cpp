// SPDX-License-Identifier: Apache-2.0
// Whether all numbers of some rows are finite: their exponents are not all ones.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "lanes.h"

namespace specplug {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

template <class T>
LANES_INLINE bool row_is_finite(const T* row, int64_t n, T exponent) {
  T found = 0;
  for (int64_t i = 0; i < n; ++i) found |= static_cast<T>((row[i] & exponent) == exponent);
  return found == 0;
}

CLONED bool words_are_finite(const uint32_t* row, int64_t n) {
  return row_is_finite<uint32_t>(row, n, 0x7f800000u);
}

CLONED bool halves_are_finite(const uint16_t* row, int64_t n, uint16_t exponent) {
  return row_is_finite<uint16_t>(row, n, exponent);
}

bool all_finite(const Tensor& rows) {
  const ScalarType dtype = rows.scalar_type();
  const bool word = dtype == ScalarType::Float, bf16 = dtype == ScalarType::BFloat16;
  STD_TORCH_CHECK(rows.dim() == 3 && rows.stride(2) == 1 && rows.stride(1) == rows.size(2) &&
                      (word || bf16 || dtype == ScalarType::Half),
                  "all_finite: rows must be bfloat16, float16 or float32 [T, H, D] with contiguous "
                  "rows");
  const int64_t n = rows.size(1) * rows.size(2);
  for (int64_t r = 0; r < rows.size(0); ++r) {
    const int64_t at = r * rows.stride(0);
    const bool finite =
        word ? words_are_finite(static_cast<const uint32_t*>(rows.data_ptr()) + at, n)
             : halves_are_finite(static_cast<const uint16_t*>(rows.data_ptr()) + at, n,
                                 bf16 ? 0x7f80 : 0x7c00);
    if (!finite) return false;
  }
  return true;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(specplug, m) { m.def("all_finite(Tensor rows) -> bool"); }

STABLE_TORCH_LIBRARY_IMPL(specplug, CPU, m) { m.impl("all_finite", TORCH_BOX(&all_finite)); }

}  // namespace specplug
