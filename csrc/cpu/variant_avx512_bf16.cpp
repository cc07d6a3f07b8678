// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "tree_attn.h"

#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,bmi2,prefer-vector-width=512")
#define VEC_WORDS 16
#define MAX_ROWS 12
#define MAX_PANELS 2
#define VEC_ROWS 1
#define BF16_DOT 1

namespace specplug {
#include "variant.inl"

const AttnVariant* variant_avx512_bf16() {
  static constexpr AttnVariant variant = make_variant("avx512_bf16");
  return &variant;
}
}  // namespace specplug
#endif
