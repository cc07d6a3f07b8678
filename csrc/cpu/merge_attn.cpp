// SPDX-License-Identifier: Apache-2.0
// Merges two attention results over disjoint keys by their log-sum-exp.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "ops.h"

namespace specplug {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

float widen(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

void mix(float* a, const float* b, float wa, float wb, int64_t n) {
  for (int64_t d = 0; d < n; ++d) a[d] = wa * a[d] + wb * b[d];
}

void mix(uint16_t* a, const uint16_t* b, float wa, float wb, int64_t n) {
  for (int64_t d = 0; d < n; ++d) a[d] = narrow(wa * widen(a[d]) + wb * widen(b[d]));
}

template <typename T>
void merge_rows(Tensor& output, Tensor& lse, const Tensor& other, const Tensor& other_lse) {
  const int64_t rows = output.size(0), heads = output.size(1), dims = output.size(2);
  T* out = static_cast<T*>(output.data_ptr());
  const T* add = static_cast<const T*>(other.data_ptr());
  float* lse_out = static_cast<float*>(lse.data_ptr());
  const float* lse_add = static_cast<const float*>(other_lse.data_ptr());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads; ++h) {
      float& la = lse_out[r * lse.stride(0) + h * lse.stride(1)];
      const float lb = lse_add[r * other_lse.stride(0) + h * other_lse.stride(1)];
      // Nothing on the other side, which may hold anything: this side stays bit for bit.
      if (lb == -std::numeric_limits<float>::infinity()) continue;
      T* a = out + r * output.stride(0) + h * output.stride(1);
      const T* b = add + r * other.stride(0) + h * other.stride(1);
      if (la == -std::numeric_limits<float>::infinity()) {
        std::memcpy(a, b, static_cast<size_t>(dims) * sizeof(T));
        la = lb;
        continue;
      }
      const float top = la > lb ? la : lb;
      const float ea = std::exp(la - top), eb = std::exp(lb - top);
      mix(a, b, ea / (ea + eb), eb / (ea + eb), dims);
      la = top + std::log(ea + eb);
    }
}

}  // namespace

void merge_attn(Tensor& output, Tensor& lse, const Tensor& other, const Tensor& other_lse) {
  const ScalarType dtype = output.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Float,
                  "merge_attn: output must be float32 or bfloat16");
  STD_TORCH_CHECK(output.dim() == 3 && other.dim() == 3 && other.scalar_type() == dtype &&
                      other.size(0) == output.size(0) && other.size(1) == output.size(1) &&
                      other.size(2) == output.size(2) && output.stride(2) == 1 &&
                      other.stride(2) == 1,
                  "merge_attn: output and other must be [T, Hq, Dh] of one dtype");
  for (const Tensor* t : {static_cast<const Tensor*>(&lse), &other_lse})
    STD_TORCH_CHECK(t->dim() == 2 && t->scalar_type() == ScalarType::Float &&
                        t->size(0) == output.size(0) && t->size(1) == output.size(1),
                    "merge_attn: lse must be float32 [T, Hq]");
  if (dtype == ScalarType::BFloat16)
    merge_rows<uint16_t>(output, lse, other, other_lse);
  else
    merge_rows<float>(output, lse, other, other_lse);
}

}  // namespace specplug
