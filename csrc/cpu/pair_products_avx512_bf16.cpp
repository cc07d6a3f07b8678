// SPDX-License-Identifier: Apache-2.0
// Products with compressed weights and with 4-bit codes by AVX-512 BF16.
#if defined(__x86_64__)
#include "pair_products.h"

#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,bmi2,prefer-vector-width=512")
#define BF16_DOT 1
#include "pair_products.inl"

namespace specplug {

const PairProducts* pair_products_avx512_bf16() { return &kPairProducts; }

}  // namespace specplug
#endif
