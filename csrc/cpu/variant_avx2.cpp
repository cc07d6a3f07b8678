// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <type_traits>

#include "tree_attn.h"

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,bmi2")
#define VEC_WORDS 8
#define MAX_ROWS 6
#define MAX_PANELS 1
#define VEC_ROWS 1
#define BF16_DOT 0

namespace specplug {
#include "variant.inl"

const AttnVariant* variant_avx2() {
  static const AttnVariant variant = {"avx2",     false,          no_state, no_state, scores,
                                      reshape,    mask,           softmax,  values,   vec_scores,
                                      vec_values, vec_row_values, pack,     write,    merge};
  return &variant;
}
}  // namespace specplug
#else
namespace specplug {
const AttnVariant* variant_avx2() { return nullptr; }
}  // namespace specplug
#endif
