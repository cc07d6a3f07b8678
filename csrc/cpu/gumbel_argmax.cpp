// SPDX-License-Identifier: Apache-2.0
// Gumbel-max sampling of rows whose noise is a hash of (seed, position, token), as vLLM's V2 runner
// keys it.
//
// The noise of a token is -log(-log(1 - u)), which falls with u. A token with logit l can beat the
// best value m found so far only if u <= exp(l - m): one exponential and a comparison rule out
// nearly all tokens, and logarithms are taken of a few dozen per row. Who wins by a hair depends on
// how logarithms are rounded; such rows are left to the caller.
#include <algorithm>
#include <cmath>
#include <limits>

#include "lanes.h"
#include "tensors.h"

namespace specplug {

namespace {

// Sums this close may be ordered otherwise by the caller, who adds in float32: an absolute bound
// for the noise, and half an ulp each for the logit, the sum and the other token's, with room to
// spare.
double close_to(double value) {
  return std::max(1e-4, 4.0 * std::numeric_limits<float>::epsilon() * std::abs(value));
}
// Tokens that are ruled out are more than `close_to` below the best one: by log of the slack,
// beyond what float32 loses when the best value is subtracted.
constexpr float kSlack = 1.001f;
float slack_of(double value) {
  if (!std::isfinite(value)) return kSlack;
  return kSlack * static_cast<float>(std::exp(std::min(2.0 * close_to(value) - 2e-4, 80.0)));
}
constexpr int64_t kUndecided = -1;

// One round of MurmurHash3.
template <class T>
ALWAYS_INLINE void mix(T& state, T key) {
  key *= 0xCC9E2D51u;
  key = (key << 15) | (key >> 17);
  key *= 0x1B873593u;
  state ^= key;
  state = (state << 13) | (state >> 19);
  state = state * 5u + 0xE6546B64u;
}

// The hash of a row's seed and position, into which tokens are mixed.
ALWAYS_INLINE uint32_t prefix_of(int64_t seed, int64_t pos) {
  uint32_t state = 0;
  mix(state, static_cast<uint32_t>(seed));
  mix(state, static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32));
  mix(state, static_cast<uint32_t>(pos));
  return state;
}

// Uniform numbers in (0, 1] of 16 tokens. Both products are exact, so that the sum is rounded once
// whether it is fused or not.
ALWAYS_INLINE Lanes uniforms(uint32_t prefix, const LanesUint& tokens) {
  LanesUint h = tokens ^ tokens;
  h += prefix;
  mix(h, tokens);
  h ^= 16u;
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  h ^= h >> 16;
  const LanesInt high = reinterpret_cast<LanesInt>(h >> 16),
                 low = reinterpret_cast<LanesInt>(h & 0xFFFFu);
  return __builtin_convertvector(high, Lanes) * 1.52587890625e-05f +
         (__builtin_convertvector(low, Lanes) + 0.5f) * 2.3283064365386963e-10f;
}

ALWAYS_INLINE double noise_of(float u) {
  const float rest = std::max(1.0f - u, 5.960464477539063e-08f);
  return -std::log(u < 0.25f ? -std::log1p(-static_cast<double>(u))
                             : -std::log(static_cast<double>(rest)));
}

struct Best {
  double value = -std::numeric_limits<double>::infinity();
  double second = -std::numeric_limits<double>::infinity();
  int64_t token = 0;

  void add(double candidate, int64_t index) {
    if (candidate > value) {
      second = value;
      value = candidate;
      token = index;
    } else if (candidate > second) {
      second = candidate;
    }
  }
};

CLONED int64_t sample_row(const float* row, int64_t n, float divisor, int64_t seed, int64_t pos) {
  const uint32_t prefix = prefix_of(seed, pos);
  LanesUint tokens;
  for (int i = 0; i < kLanes; ++i) tokens[i] = static_cast<uint32_t>(i);
  const Lanes none = Lanes{} - std::numeric_limits<float>::infinity();
  LanesInt nan = {};
  Best best;
  float slack = kSlack;
  for (int64_t begin = 0; begin < n; begin += kLanes, tokens += static_cast<uint32_t>(kLanes)) {
    Lanes x = none;
    if (begin + kLanes <= n) {
      x = load_lanes(row + begin);
    } else {
      for (int64_t i = begin; i < n; ++i) x[i - begin] = row[i];
    }
    nan |= x != x;
    x /= divisor;
    const Lanes u = uniforms(prefix, tokens);
    const Lanes most = exp_lanes(x - static_cast<float>(best.value));
    const LanesInt may_win = u <= most * slack;
    int any = 0;
    for (int i = 0; i < kLanes; ++i) any |= may_win[i];
    if (!any) continue;
    for (int i = 0; i < kLanes; ++i)
      if (may_win[i]) best.add(x[i] + noise_of(u[i]), begin + i);
    slack = slack_of(best.value);
  }
  for (int i = 0; i < kLanes; ++i)
    if (nan[i]) return kUndecided;
  // Rows of only -inf: the first token, as nothing beats it.
  const bool is_empty = std::isinf(best.value) && best.value < 0;
  if (is_empty || (std::isinf(best.value) && best.second < best.value)) return best.token;
  return best.value - best.second > close_to(best.value) ? best.token : kUndecided;
}

void gumbel_argmax(const Tensor& logits, const Tensor& divisors, const Tensor& seeds,
                   const Tensor& positions, Tensor& winners) {
  STD_TORCH_CHECK(is_tensor(logits, ScalarType::Float, {kAny, kAny}),
                  "gumbel_argmax: logits must be contiguous float32 [L, V]");
  const int64_t count = logits.size(0), n = logits.size(1);
  STD_TORCH_CHECK(is_tensor(divisors, ScalarType::Float, {count}) &&
                      is_tensor(seeds, ScalarType::Long, {count}) &&
                      is_tensor(positions, ScalarType::Long, {count}) &&
                      is_tensor(winners, ScalarType::Long, {count}),
                  "gumbel_argmax: divisors float32, seeds, positions and winners int64, all [L]");
  const float* in = data<float>(logits);
  const float* divisor = data<float>(divisors);
  const int64_t* seed = data<int64_t>(seeds);
  const int64_t* pos = data<int64_t>(positions);
  int64_t* out = data<int64_t>(winners);
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      if (divisor[r] != 0.0f) out[r] = sample_row(in + r * n, n, divisor[r], seed[r], pos[r]);
  });
}

}  // namespace

OPERATOR(CPU, gumbel_argmax,
         "(Tensor logits, Tensor divisors, Tensor seeds, Tensor positions, Tensor(a!) winners) -> "
         "()")

}  // namespace specplug
