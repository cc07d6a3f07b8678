// SPDX-License-Identifier: Apache-2.0
// The k likeliest entries of rows of logits, with their log-probabilities over the whole row.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lanes.h"
#include "tensors.h"

namespace specplug {

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Entry {
  float value;
  int64_t index;
};

// Largest first; equal values keep their order, so that the result does not depend on the path.
bool comes_first(const Entry& a, const Entry& b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// Stores numbers, -inf for NaN, which is never a candidate; returns the larger of each and `top`.
ALWAYS_INLINE Lanes keep(const Lanes& x, const Lanes& top, float* out) {
  const Lanes kept = x == x ? x : Lanes{} + kNone;
  store_lanes(out, kept);
  return kept > top ? kept : top;
}

// Copies a row padded with -inf to `padded` entries; the maximum of every `chunk` of them.
template <class T>
ALWAYS_INLINE void load_row(const T* row, int64_t n, int64_t chunk, float* out, float* maxima) {
  const Lanes none = Lanes{} + kNone;
  int64_t at = 0;
  for (int64_t c = 0; at < n; ++c) {
    Lanes top = none;
    const int64_t end = at + chunk;
    for (; at < end && at + kLanes <= n; at += kLanes)
      top = keep(load_lanes(row + at), top, out + at);
    for (; at < end; at += kLanes) {
      Lanes x = none;
      for (int64_t i = at; i < n; ++i) x[i - at] = value_of(row[i]);
      top = keep(x, top, out + at);
    }
    maxima[c] = max_of(top);
  }
}

CLONED void load_numbers(const uint16_t* row, int64_t n, int64_t chunk, float* out, float* maxima) {
  load_row(row, n, chunk, out, maxima);
}
CLONED void load_numbers(const Float16* row, int64_t n, int64_t chunk, float* out, float* maxima) {
  load_row(row, n, chunk, out, maxima);
}
CLONED void load_numbers(const float* row, int64_t n, int64_t chunk, float* out, float* maxima) {
  load_row(row, n, chunk, out, maxima);
}

CLONED float sum_of_exp(const float* row, int64_t padded, float shift) {
  Lanes sum = {};
  for (int64_t at = 0; at < padded; at += kLanes) sum += exp_lanes(load_lanes(row + at) - shift);
  return sum_of(sum);
}

struct Workspace {
  std::vector<float> row, maxima, ranked;
  std::vector<Entry> found;
};

void select(const void* logits, Element element, int64_t n, int64_t k, Workspace& work,
            int64_t* ids, float* log_probs) {
  // Chunks small enough that the k-th largest maximum is close to the k-th largest entry.
  int64_t chunk = kLanes;
  while (chunk < 512 && n / (2 * chunk) >= 4 * k) chunk *= 2;
  const int64_t chunks = (n + chunk - 1) / chunk;
  work.row.resize(chunks * chunk);
  work.maxima.resize(chunks);
  float* row = work.row.data();
  with_number(element, [&](auto number) {
    load_numbers(static_cast<const decltype(number)*>(logits), n, chunk, row, work.maxima.data());
  });
  float floor = kNone;
  if (chunks > k) {
    work.ranked = work.maxima;
    std::nth_element(work.ranked.begin(), work.ranked.begin() + k - 1, work.ranked.end(),
                     std::greater<float>());
    floor = work.ranked[k - 1];
  }
  const float peak = *std::max_element(work.maxima.begin(), work.maxima.end());
  work.found.clear();
  for (int64_t c = 0; c < chunks; ++c) {
    if (!(work.maxima[c] >= floor) || work.maxima[c] == kNone) continue;
    for (int64_t i = c * chunk; i < (c + 1) * chunk; ++i)
      if (row[i] >= floor && row[i] > kNone) work.found.push_back({row[i], i});
  }
  const int64_t kept = std::min<int64_t>(k, static_cast<int64_t>(work.found.size()));
  if (kept < static_cast<int64_t>(work.found.size()))
    std::nth_element(work.found.begin(), work.found.begin() + kept, work.found.end(), comes_first);
  std::sort(work.found.begin(), work.found.begin() + kept, comes_first);
  const float total =
      kept ? peak + std::log(sum_of_exp(row, static_cast<int64_t>(work.row.size()), peak)) : 0.0f;
  for (int64_t i = 0; i < k; ++i) {
    ids[i] = i < kept ? work.found[i].index : 0;
    log_probs[i] = i < kept ? work.found[i].value - total : kNone;
  }
}

void top_candidates(const Tensor& logits, Tensor& ids, Tensor& log_probs) {
  const std::optional<Element> element = element_of(logits.scalar_type());
  STD_TORCH_CHECK(
      element.has_value() && size_of(*element) > 1 && logits.dim() == 2 && logits.is_contiguous(),
      "top_candidates: logits must be contiguous bfloat16, float16 or float32 [T, V]");
  const int64_t rows = logits.size(0), n = logits.size(1);
  STD_TORCH_CHECK(is_tensor(ids, ScalarType::Long, {rows, kAny}) &&
                      is_tensor(log_probs, ScalarType::Float, {rows, ids.size(1)}),
                  "top_candidates: outputs must be int64 and float32 [T, K]");
  const int64_t k = ids.size(1);
  STD_TORCH_CHECK(1 <= k && k <= n, "top_candidates: ", k, " of ", n, " entries");
  const char* in = data<char>(logits);
  int64_t* id = data<int64_t>(ids);
  float* log_prob = data<float>(log_probs);
  const int64_t row_bytes = n * size_of(*element);
  torch::stable::parallel_for(0, rows, 4, [&](int64_t begin, int64_t end) {
    Workspace work;
    for (int64_t r = begin; r < end; ++r)
      select(in + r * row_bytes, *element, n, k, work, id + r * k, log_prob + r * k);
  });
}

}  // namespace

OPERATOR(CPU, top_candidates, "(Tensor logits, Tensor(a!) ids, Tensor(b!) log_probs) -> ()")

}  // namespace specplug
