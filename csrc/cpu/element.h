// SPDX-License-Identifier: Apache-2.0
// Number formats of tensors and KV caches, and their conversion to float32.
#pragma once

#include <cstdint>
#include <cstring>

// Of functions that run in the instruction set of their caller.
#define ALWAYS_INLINE static inline __attribute__((always_inline))

namespace specplug {

enum class Element : int { kFloat, kBfloat16, kFloat16, kE4m3, kE5m2 };

constexpr int size_of(Element e) {
  return e == Element::kFloat ? 4 : e == Element::kBfloat16 || e == Element::kFloat16 ? 2 : 1;
}

// Bits of one number, as a type of its own: overloads tell formats of one width apart.
template <int MANTISSA, int EXPONENT, bool IEEE, class Bits>
struct SmallFloat {
  Bits bits;
};
using Float16 = SmallFloat<10, 5, true, uint16_t>;
using E4m3 = SmallFloat<3, 4, false, uint8_t>;
using E5m2 = SmallFloat<2, 5, true, uint8_t>;

// Bits of the float32 equal to a small float of MANTISSA bits. Works on scalars and on GCC vectors
// (U unsigned, F float) alike, and has no branch. Denormals come out exact, also where the CPU
// flushes them; IEEE formats have infinities, the others (e4m3fn) one NaN per sign.
template <int MANTISSA, int EXPONENT, bool IEEE, class F, class U>
ALWAYS_INLINE void widen_bits(const U& raw, U& out) {
  constexpr int kBias = (1 << (EXPONENT - 1)) - 1;
  constexpr int kShift = 23 - MANTISSA;
  constexpr uint32_t kMagnitude = (1u << (MANTISSA + EXPONENT)) - 1u;
  constexpr uint32_t kSpecial = IEEE ? ((1u << EXPONENT) - 1u) << MANTISSA : kMagnitude;
  const U magnitude = raw & kMagnitude;
  const U sign = (raw & (kMagnitude + 1u)) << (31 - MANTISSA - EXPONENT);
  const U normal = (magnitude << kShift) + (static_cast<uint32_t>(127 - kBias) << 23);
  const U shifted = normal + (1u << 23);
  const uint32_t base_bits = static_cast<uint32_t>(128 - kBias) << 23;
  F small;
  float base;
  std::memcpy(&small, &shifted, sizeof(F));
  std::memcpy(&base, &base_bits, sizeof(base));
  small = small - base;
  U denormal;
  std::memcpy(&denormal, &small, sizeof(U));
  const U finite = magnitude < (1u << MANTISSA) ? denormal : normal;
  const U special = finite | 0x7f800000u;
  out = (magnitude >= kSpecial ? special : finite) | sign;
}

// Bits of one number as those of a float32.
ALWAYS_INLINE uint32_t word_of(uint32_t x) { return x; }
ALWAYS_INLINE uint32_t word_of(uint16_t x) { return static_cast<uint32_t>(x) << 16; }
template <int MANTISSA, int EXPONENT, bool IEEE, class Bits>
ALWAYS_INLINE uint32_t word_of(SmallFloat<MANTISSA, EXPONENT, IEEE, Bits> x) {
  const uint32_t raw = x.bits;
  uint32_t out;
  widen_bits<MANTISSA, EXPONENT, IEEE, float>(raw, out);
  return out;
}

ALWAYS_INLINE float value_of(float x) { return x; }
template <class T>
ALWAYS_INLINE float value_of(T x) {
  const uint32_t bits = word_of(x);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Calls `run` with a number of a format of 16 or 32 bits.
template <class Run>
void with_number(Element element, const Run& run) {
  if (element == Element::kBfloat16)
    run(uint16_t{});
  else if (element == Element::kFloat16)
    run(Float16{});
  else
    run(float{});
}

// Rounds to float16, ties to even; NaN stays NaN, what is too large becomes infinite.
ALWAYS_INLINE uint16_t round_float16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Adding 0.5 leaves the digits of a denormal in the low bits, rounded.
  float small;
  std::memcpy(&small, &magnitude, sizeof(small));
  small += 0.5f;
  uint32_t denormal;
  std::memcpy(&denormal, &small, sizeof(denormal));
  denormal -= 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < (113u << 23) ? denormal : normal;
  const uint32_t rounded = magnitude >= (143u << 23) ? large : finite;
  return static_cast<uint16_t>(rounded | ((bits >> 16) & 0x8000u));
}

// Widens n numbers to words of float32.
ALWAYS_INLINE void widen(Element element, const void* from, int64_t n, uint32_t* to) {
  if (element == Element::kBfloat16)
    for (int64_t i = 0; i < n; ++i) to[i] = word_of(static_cast<const uint16_t*>(from)[i]);
  else if (element == Element::kFloat16)
    for (int64_t i = 0; i < n; ++i) to[i] = word_of(static_cast<const Float16*>(from)[i]);
  else
    std::memcpy(to, from, static_cast<size_t>(n) * 4);
}

}  // namespace specplug
