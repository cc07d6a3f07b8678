// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <type_traits>

#include "tree_attn.h"

#if defined(__x86_64__)
#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,bmi2,prefer-vector-width=512")
#define VEC_WORDS 16
#define MAX_ROWS 12
#define MAX_PANELS 2
#define VEC_ROWS 1
#define BF16_DOT 1
#define DOT(acc, a, b)                                                                     \
  reinterpret_cast<VecF>(                                                                  \
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(acc),                                      \
                       reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a))), \
                       reinterpret_cast<__m512bh>(b)))
#define STORE_BF16(p, col, w)                                                             \
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(p) + (col)), \
                      reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(w))))

namespace specplug {
#include "variant.inl"

const AttnVariant* variant_avx512_bf16() {
  static const AttnVariant variant = {"avx512_bf16", true,           no_state, no_state, scores,
                                      reshape,       mask,           softmax,  values,   vec_scores,
                                      vec_values,    vec_row_values, pack,     write,    merge};
  return &variant;
}
}  // namespace specplug
#else
namespace specplug {
const AttnVariant* variant_avx512_bf16() { return nullptr; }
}  // namespace specplug
#endif
