// SPDX-License-Identifier: Apache-2.0
// Products of rows with 4-bit codes. The codes of a group are multiplied as they are, and their sum
// then with the group's scale, so a code costs a shift and a table lookup. Included behind
// `packed_columns.inl`.

namespace specplug {
namespace {
namespace int4 {

// The sums of a few rows by a panel, or of twice as many by half of it, once for the group and once
// in all, fill the registers for sums.
constexpr int kFewRows = kSumRegisters / 4, kMostRows = kSumRegisters / 2;
// Up to two rows are done with a line before the next one comes from memory: then the first cache
// is asked for at once. More rows ask for the second, and soon after for the first.
constexpr int kRowsFromMemory = 2;
constexpr int64_t kAtOnce = 8192, kLater = 16384, kSoon = 2048;

#if BF16_DOT
// bfloat16 of the codes 0 to 15, twice: a lookup uses 5 bits of a word, of which 4 are the code.
ALWAYS_INLINE __m512i code_table() {
  alignas(64) uint16_t table[32];
  for (int i = 0; i < 32; ++i) {
    const float value = static_cast<float>(i % 16 - kInt4Bias);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    table[i] = static_cast<uint16_t>(bits >> 16);
  }
  return _mm512_load_si512(table);
}

// The lowest codes of `words`.
ALWAYS_INLINE Pairs codes_of(__m512i words, __m512i table) {
  return _mm512_permutexvar_epi16(words, table);
}
#else
ALWAYS_INLINE __m512 code_table() {
  const __m512i codes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(kInt4Bias)));
}

// The lowest codes of `words`: a lookup uses the 4 lowest bits of 32.
ALWAYS_INLINE Pairs codes_of(__m512i words, __m512 table) {
  return {_mm512_permutexvar_ps(words, table),
          _mm512_permutexvar_ps(_mm512_srli_epi32(words, 16), table)};
}
#endif

ALWAYS_INLINE __m512 load_16(const char* from) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

// R rows from `row` on by V vectors of columns of a panel, from vector `first` on.
template <int R, int V>
ALWAYS_INLINE void multiply_part(const Int4Product& p, int64_t row, int64_t panel, int first,
                                 bool from_memory) {
  const Int4Shape& shape = p.shape;
  const int64_t groups = shape.groups(), units = shape.group_depth / kInt4UnitDepth;
  const auto table = code_table();
  const char* at = p.weight + panel * shape.panel_bytes();
  const char* x = p.x + row * p.row_bytes;
  const int64_t step = pair_step(p.x_stride);
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
      for (int pair = 0; pair < 4; ++pair, x += step) {
        Pairs codes[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
          codes[v] = codes_of(words[v], table);
          words[v] = _mm512_srli_epi16(words[v], 4);
        }
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) add_products(of_group[r], codes, x, r, p.x_stride);
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

// All rows by the panels [first, last).
void multiply(const Int4Product& p, int64_t first, int64_t last) {
  for (int64_t panel = first; panel < last; ++panel)
    for (int64_t row = 0; row < p.rows; row += p.tile_rows)
      kMultiplyRows[static_cast<size_t>(std::min(p.tile_rows, p.rows - row))](p, row, panel,
                                                                              row == 0);
}

}  // namespace int4
}  // namespace
}  // namespace specplug
