// SPDX-License-Identifier: Apache-2.0
// Products with compressed weights and with 4-bit codes by float32 arithmetic of AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "compressed_panels.h"
#include "int4_panels.h"
#include "pair_products.h"

#if defined(__x86_64__)
// GCC 12's headers make an undefined vector by initialising it with itself.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi2,prefer-vector-width=512")
#define BF16_DOT 0
#include "packed_columns.inl"
// The next files use it.
#include "compressed_products.inl"
#include "int4_products.inl"

namespace specplug {

const PairProducts* pair_products_avx512() {
  static const PairProducts products = {kTakesTiles,           compressed::kFewRows,
                                        compressed::kManyRows, compressed::multiply,
                                        int4::kMostRows,       int4::multiply};
  return &products;
}

}  // namespace specplug
#pragma GCC pop_options
#pragma GCC diagnostic pop
#else
namespace specplug {
const PairProducts* pair_products_avx512() { return nullptr; }
}  // namespace specplug
#endif
