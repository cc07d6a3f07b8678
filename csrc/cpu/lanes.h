// SPDX-License-Identifier: Apache-2.0
// Sixteen floats at once in plain GCC vectors, for loops that are compiled once per instruction set
// by CLONED. Such functions hold everything they call inlined.
#pragma once

#include <cstdint>
#include <cstring>

#include "element.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONED
#endif

namespace specplug {

typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t LanesInt __attribute__((vector_size(64)));
typedef uint16_t LanesHalf __attribute__((vector_size(32)));
typedef uint32_t LanesUint __attribute__((vector_size(64)));
constexpr int kLanes = 16;

// How a vector is returned depends on the instruction set, but these functions are always inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

ALWAYS_INLINE Lanes load_lanes(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

ALWAYS_INLINE Lanes load_lanes(const uint16_t* p) {
  LanesHalf half;
  std::memcpy(&half, p, sizeof(half));
  return reinterpret_cast<Lanes>(__builtin_convertvector(half, LanesUint) << 16);
}

ALWAYS_INLINE Lanes load_lanes(const Float16* p) {
  LanesHalf half;
  std::memcpy(&half, p, sizeof(half));
  LanesUint wide = __builtin_convertvector(half, LanesUint);
  widen_bits<10, 5, true, Lanes>(wide, wide);
  return reinterpret_cast<Lanes>(wide);
}

ALWAYS_INLINE void store_lanes(float* p, const Lanes& v) { std::memcpy(p, &v, sizeof(Lanes)); }

// Rounds to bf16, ties to even; NaN may come out as any value.
ALWAYS_INLINE void store_lanes(uint16_t* p, const Lanes& v) {
  const LanesUint bits = reinterpret_cast<LanesUint>(v);
  const LanesUint rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const LanesHalf half = __builtin_convertvector(rounded, LanesHalf);
  std::memcpy(p, &half, sizeof(half));
}

// e^x, relative error below 1e-6; 0 below -87, no larger than e^87.
ALWAYS_INLINE Lanes exp_lanes(const Lanes& from) {
  const Lanes zero = {};
  const LanesInt low = from < zero - 87.0f;
  Lanes x = from > zero + 87.0f ? zero + 87.0f : from;
  x = low ? zero - 87.0f : x;
  const Lanes scaled = x * 1.4426950408889634f;
  const Lanes shifted = scaled + 12582912.0f;  // 1.5 * 2^23: an integer in the low bits
  const Lanes r = scaled - (shifted - 12582912.0f);
  Lanes p = zero + 0.0013276472454890609f;
  p = p * r + 0.009675540961325169f;
  p = p * r + 0.05550713092088699f;
  p = p * r + 0.24022120237350464f;
  p = p * r + 0.6931469440460205f;
  p = p * r + 1.0000001192092896f;
  const LanesInt power = reinterpret_cast<LanesInt>(shifted) << 23;
  return low ? zero : reinterpret_cast<Lanes>(reinterpret_cast<LanesInt>(p) + power);
}

ALWAYS_INLINE Lanes sigmoid_lanes(const Lanes& x) { return 1.0f / (1.0f + exp_lanes(-x)); }

ALWAYS_INLINE Lanes tanh_lanes(const Lanes& x) {
  return 1.0f - 2.0f / (1.0f + exp_lanes(2.0f * x));
}

ALWAYS_INLINE float max_of(const Lanes& v) {
  float top = v[0];
  for (int i = 1; i < kLanes; ++i) top = v[i] > top ? v[i] : top;
  return top;
}

ALWAYS_INLINE float sum_of(const Lanes& v) {
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

}  // namespace specplug
