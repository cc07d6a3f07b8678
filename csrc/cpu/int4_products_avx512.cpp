// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 rows with 4-bit codes, by AVX-512 BF16. The codes of a group are multiplied
// as they are, and their sum then with the group's scale, so a code costs a shift and a table
// lookup for 32 numbers.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "int4_panels.h"

#if defined(__x86_64__)
// GCC 12's headers make an undefined vector by initialising it with itself.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,bmi2,prefer-vector-width=512")
#include "packed_columns.inl"

namespace specplug {

namespace {

// The sums of 7 rows by a panel, or of 14 by half of it, once for the group and once in all, and
// what is multiplied fill the 32 registers.
constexpr int kFewRows = 7, kMostRows = 14;
// Up to two rows are done with a line before the next one comes from memory: then the first cache
// is asked for at once. More rows ask for the second, and soon after for the first.
constexpr int kRowsFromMemory = 2;
constexpr int64_t kAtOnce = 8192, kLater = 16384, kSoon = 2048;

// bfloat16 of the codes 0 to 15, twice: a lookup uses 5 bits of a word, of which 4 are the code.
inline __attribute__((always_inline)) __m512i code_table() {
  alignas(64) uint16_t table[32];
  for (int i = 0; i < 32; ++i) {
    const float value = static_cast<float>(i % 16 - kInt4Bias);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    table[i] = static_cast<uint16_t>(bits >> 16);
  }
  return _mm512_load_si512(table);
}

inline __attribute__((always_inline)) __m512 load_16(const char* from) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

// R rows from `row` on by V vectors of columns of a panel, from vector `first` on.
template <int R, int V>
inline __attribute__((always_inline)) void multiply_part(const Int4Product& p, int64_t row,
                                                         int64_t panel, int first,
                                                         bool from_memory) {
  const Int4Shape& shape = p.shape;
  const int64_t groups = shape.groups(), units = shape.group_depth / kInt4UnitDepth;
  const __m512i table = code_table();
  const char* at = p.weight + panel * shape.panel_bytes();
  const char* x = p.x + row * p.x_stride;
  __m512 sums[R][V];
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) sums[r][v] = _mm512_setzero_ps();
  for (int64_t group = 0; group < groups; ++group) {
    __m512 scales[V], offsets[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) scales[v] = load_16(at + (first + v) * 32);
    at += kLine;
    if (shape.has_zeros) {
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v)
        offsets[v] = _mm512_mul_ps(scales[v], load_16(at + (first + v) * 32));
      at += kLine;
#pragma GCC unroll 32
      for (int r = 0; r < R; ++r) {
        const __m512 all = _mm512_set1_ps(p.sums[(row + r) * groups + group]);
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sums[r][v] = _mm512_fnmadd_ps(all, offsets[v], sums[r][v]);
      }
    }
    __m512 of_group[R][V];
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) of_group[r][v] = _mm512_setzero_ps();
    for (int64_t unit = 0; unit < units; ++unit, at += 2 * kLine) {
      if (from_memory) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          if constexpr (R <= kRowsFromMemory) {
            _mm_prefetch(at + kAtOnce + i * kLine, _MM_HINT_T0);
          } else {
            _mm_prefetch(at + kLater + i * kLine, _MM_HINT_T1);
            _mm_prefetch(at + kSoon + i * kLine, _MM_HINT_T0);
          }
        }
      }
      __m512i words[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) words[v] = _mm512_loadu_si512(at + (first + v) * kLine);
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; ++pair, x += kGroupBytes) {
        __m512i codes[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
          codes[v] = _mm512_permutexvar_epi16(words[v], table);
          words[v] = _mm512_srli_epi16(words[v], 4);
        }
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) {
          const __m512i all = broadcast(x + r * p.x_stride);
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v)
            of_group[r][v] = _mm512_dpbf16_ps(of_group[r][v], reinterpret_cast<__m512bh>(codes[v]),
                                              reinterpret_cast<__m512bh>(all));
        }
      }
    }
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v)
        sums[r][v] = _mm512_fmadd_ps(of_group[r][v], scales[v], sums[r][v]);
  }
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) {
    const int64_t column = panel * kPanelColumns + (first + v) * 16;
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) store(sums[r][v], p.bias, p.out, shape.columns, row + r, column);
  }
}

template <int R>
void multiply_rows(const Int4Product& p, int64_t row, int64_t panel, bool from_memory) {
  if constexpr (R <= kFewRows) {
    multiply_part<R, 2>(p, row, panel, 0, from_memory);
  } else {
    multiply_part<R, 1>(p, row, panel, 0, from_memory);
    multiply_part<R, 1>(p, row, panel, 1, false);
  }
}

using MultiplyRows = void (*)(const Int4Product&, int64_t, int64_t, bool);

template <int... R>
constexpr std::array<MultiplyRows, sizeof...(R) + 1> by_rows(std::integer_sequence<int, R...>) {
  return {nullptr, multiply_rows<R + 1>...};
}
constexpr auto kMultiplyRows = by_rows(std::make_integer_sequence<int, kMostRows>{});

}  // namespace

void multiply_int4(const Int4Product& p, int64_t first, int64_t last) {
  const int64_t blocks = (p.rows + kMostRows - 1) / kMostRows;
  const int64_t tile = (p.rows + blocks - 1) / blocks;
  for (int64_t panel = first; panel < last; ++panel)
    for (int64_t row = 0; row < p.rows; row += tile)
      kMultiplyRows[static_cast<size_t>(std::min(tile, p.rows - row))](p, row, panel, row == 0);
}

void sum_groups(const uint16_t* row, int64_t groups, int64_t group_depth, float* sums) {
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  for (int64_t group = 0; group < groups; ++group) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < group_depth; k += 32) {
      const __mmask32 held =
          static_cast<__mmask32>((uint64_t{1} << std::min<int64_t>(32, group_depth - k)) - 1);
      const __m512i numbers = _mm512_maskz_loadu_epi16(held, row + group * group_depth + k);
      sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(numbers),
                             reinterpret_cast<__m512bh>(ones));
    }
    sums[group] = _mm512_reduce_add_ps(sum);
  }
}

}  // namespace specplug
#pragma GCC pop_options
#pragma GCC diagnostic pop
#else
namespace specplug {
void multiply_int4(const Int4Product&, int64_t, int64_t) {}
void sum_groups(const uint16_t*, int64_t, int64_t, float*) {}
}  // namespace specplug
#endif
