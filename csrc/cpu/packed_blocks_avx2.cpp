// SPDX-License-Identifier: Apache-2.0
// Packed bfloat16 products with AVX2, which has no bfloat16 arithmetic: weights become float32 on
// the way to the registers, by one shift for the even numbers of a pair and two for the odd ones (a
// mask would take a register that is a sum's).
#if defined(__x86_64__)
#include "packed_blocks.h"

#pragma GCC target("avx2,fma,bmi2")

namespace specplug {

namespace {

constexpr int64_t kWidth = 8;  // numbers of a vector
constexpr int kVectors = kPanelColumns / kWidth;

// Rounds to bfloat16, ties to even; NaN stays NaN.
ALWAYS_INLINE __m128i round_bf16(__m256 sums) {
  const __m256i bits = _mm256_castps_si256(sums);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(sums, sums, _CMP_UNORD_Q));
  const __m256i words =
      _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

// Sums of one row by `vectors` vectors of columns, with the bias.
void store(const Product& p, const float* sums, int64_t row, int64_t column, int vectors) {
  const int64_t end = std::min(column + vectors * kWidth, p.columns);
  for (; column < end; column += kWidth, sums += kWidth) {
    const int64_t width = std::min(kWidth, end - column);
    float offsets[kWidth] = {};
    for (int64_t i = 0; p.bias != nullptr && i < width; ++i) {
      const uint32_t word = static_cast<uint32_t>(p.bias[column + i]) << 16;
      std::memcpy(offsets + i, &word, sizeof(word));
    }
    const __m128i rounded =
        round_bf16(_mm256_add_ps(_mm256_loadu_ps(sums), _mm256_loadu_ps(offsets)));
    std::memcpy(p.out + row * p.columns + column, &rounded, static_cast<size_t>(width) * 2);
  }
}

// The even or the odd numbers of 8 pairs.
ALWAYS_INLINE __m256 numbers(const char* pairs, int odd) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(odd != 0 ? _mm256_srli_epi32(words, 16) : words, 16));
}

// Instructions that stay where they are: GCC 12 otherwise reads numbers of rows ahead, and moves
// sums to memory for them.
ALWAYS_INLINE __m256 broadcast(const float* x) {
  __m256 all;
  asm volatile("vbroadcastss %1, %0" : "=x"(all) : "m"(*x));
  return all;
}

ALWAYS_INLINE void add(__m256& sum, __m256 row, __m256 columns) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(row), "x"(columns));
}

// R rows by V vectors of the columns of a panel, from vector `first` on.
template <int R, int V>
ALWAYS_INLINE void part(const Product& p, int64_t row, int64_t panel, int first, const char* ahead,
                        int64_t lines) {
  const int64_t groups = p.groups, tile_rows = p.tile_rows;
  const char* weight = p.weight + (panel * groups * kPanelColumns + first * kWidth) * kGroupBytes;
  const float* x = reinterpret_cast<const float*>(p.x) + row * groups * 2;
  const char* const end = ahead + lines * kLine;
  __m256 sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = _mm256_setzero_ps();
  for (int64_t k = 0; k < groups; ++k, weight += kPanelColumns * kGroupBytes) {
    // A line for each that is read; at the end what is in the cache.
    const char* const next = ahead < end ? ahead : weight;
#pragma GCC unroll 8
    for (int v = 0; v < V; v += 2) _mm_prefetch(next + v / 2 * kLine, _MM_HINT_T0);
    ahead += V / 2 * kLine;
    // Words are read twice: with 12 sums, no register is left to keep them in.
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd, x += tile_rows) {
      asm volatile("" : "+r"(weight), "+r"(x));
      if constexpr (R < V) {
        __m256 rows[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) rows[r] = broadcast(x + r);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          const __m256 columns = numbers(weight + v * kWidth * kGroupBytes, odd);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) add(sums[r][v], rows[r], columns);
        }
      } else {
        __m256 columns[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) columns[v] = numbers(weight + v * kWidth * kGroupBytes, odd);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m256 all = broadcast(x + r);
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) add(sums[r][v], all, columns[v]);
        }
      }
    }
  }
  float found[R][V * kWidth];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) _mm256_storeu_ps(found[r] + v * kWidth, sums[r][v]);
  for (int r = 0; r < R; ++r)
    store(p, found[r], row + r, panel * kPanelColumns + first * kWidth, V);
}

// Sixteen registers hold the sums of 3 rows by a whole panel, or of 6 rows by half a panel: then
// the second half of its lines comes from a cache.
constexpr int kWholePanelRows = 3;

template <int R>
void block(const Product& p, int64_t row, int64_t panel, const char* ahead, int64_t lines) {
  if constexpr (R <= kWholePanelRows) {
    part<R, kVectors>(p, row, panel, 0, ahead, lines);
  } else {
    const int64_t half = lines / 2;
    part<R, kVectors / 2>(p, row, panel, 0, ahead, half);
    part<R, kVectors / 2>(p, row, panel, kVectors / 2, ahead + half * kLine, lines - half);
  }
}

constexpr Block kNarrow[] = {nullptr, block<1>, block<2>, block<3>, block<4>, block<5>, block<6>};
constexpr Blocks kBlocks = {kNarrow, 6, kWholePanelRows, nullptr, 0, 0, 126, true};

}  // namespace

const Blocks* bf16_blocks_avx2() { return &kBlocks; }

}  // namespace specplug
#endif
