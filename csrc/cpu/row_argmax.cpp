// SPDX-License-Identifier: Apache-2.0
// The index of each row's largest entry, as torch.argmax gives it: the first of equals, and NaN
// above everything. One pass over the row, then one over the chunk that holds the maximum.
#include <algorithm>
#include <limits>

#include "lanes.h"
#include "tensors.h"

namespace specplug {

namespace {

constexpr int64_t kChunk = 64 * kLanes;
constexpr float kNone = -std::numeric_limits<float>::infinity();

template <class T>
ALWAYS_INLINE int64_t argmax_of(const T* row, int64_t n) {
  float best = kNone;
  int64_t best_chunk = 0;
  bool is_nan = false;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, n);
    Lanes top = Lanes{} + kNone;
    LanesInt nan = {};
    int64_t at = begin;
    for (; at + kLanes <= end; at += kLanes) {
      Lanes x = load_lanes(row + at);
      nan |= x != x;
      top = x > top ? x : top;
    }
    float chunk_top = max_of(top);
    for (int i = 0; i < kLanes; ++i) is_nan |= nan[i] != 0;
    for (; at < end; ++at) {
      const float x = value_of(row[at]);
      is_nan |= x != x;
      chunk_top = x > chunk_top ? x : chunk_top;
    }
    if (chunk_top > best) {
      best = chunk_top;
      best_chunk = begin;
    }
  }
  if (is_nan) {
    for (int64_t i = 0; i < n; ++i)
      if (const float x = value_of(row[i]); x != x) return i;
  }
  int64_t i = best_chunk;
  while (value_of(row[i]) != best) ++i;
  return i;
}

CLONED int64_t argmax(const uint16_t* row, int64_t n) { return argmax_of(row, n); }
CLONED int64_t argmax(const Float16* row, int64_t n) { return argmax_of(row, n); }
CLONED int64_t argmax(const float* row, int64_t n) { return argmax_of(row, n); }

void row_argmax(const Tensor& rows, Tensor& indices) {
  const std::optional<Element> element = element_of(rows.scalar_type());
  STD_TORCH_CHECK(element.has_value() && size_of(*element) > 1 && rows.dim() == 2 &&
                      rows.size(1) > 0 && rows.is_contiguous(),
                  "row_argmax: rows must be contiguous bfloat16, float16 or float32 [T, V]");
  const int64_t count = rows.size(0), n = rows.size(1);
  STD_TORCH_CHECK(is_tensor(indices, ScalarType::Long, {count}),
                  "row_argmax: indices must be int64 [T]");
  int64_t* out = data<int64_t>(indices);
  torch::stable::parallel_for(0, count, 4, [&](int64_t begin, int64_t end) {
    with_number(*element, [&](auto number) {
      using T = decltype(number);
      for (int64_t r = begin; r < end; ++r) out[r] = argmax(data<T>(rows) + r * n, n);
    });
  });
}

}  // namespace

OPERATOR(CPU, row_argmax, "(Tensor rows, Tensor(a!) indices) -> ()")

}  // namespace specplug
