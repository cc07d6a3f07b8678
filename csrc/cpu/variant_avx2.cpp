// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "tree_attn.h"

#pragma GCC target("avx2,fma,bmi2")
#define VEC_WORDS 8
#define MAX_ROWS 6
#define MAX_PANELS 1
#define VEC_ROWS 1
#define BF16_DOT 0

namespace specplug {
#include "variant.inl"

const AttnVariant* variant_avx2() {
  static constexpr AttnVariant variant = make_variant("avx2");
  return &variant;
}
}  // namespace specplug
#endif
