// SPDX-License-Identifier: Apache-2.0
// Packed int8 products with AVX-512 VNNI: an instruction multiplies four numbers of a row with as
// many of each of 16 columns.
#if defined(__x86_64__)
#include "packed_blocks.h"

#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,bmi2,prefer-vector-width=512")
#define BF16_DOT 0
#include "packed_columns.inl"

namespace specplug {

namespace {

// So few rows are done with a line before the next one comes: the few lines that the first cache
// can wait for at once then hold the panel up, and what is asked for goes to the second. (Zen
// 4: 9.4 MB by 7 rows take 0.40 ms in place of 0.70.)
constexpr int kRowsFromL2 = 8;

// R rows by P panels.
template <int R, int P>
void block(const Product& p, int64_t row, int64_t panel, const char* ahead, int64_t lines) {
  constexpr int V = 2 * P;
  const int64_t groups = p.groups, panel_size = groups * kPanelColumns * kGroupBytes;
  const char* weight = p.weight + panel * panel_size;
  const char* x = p.x + row * p.x_stride;
  __m512i sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = _mm512_setzero_si512();
  const auto add_group = [&](int64_t k) __attribute__((always_inline)) {
    __m512i columns[V];
    for (int v = 0; v < V; ++v)
      columns[v] = _mm512_loadu_si512(weight + (v / 2) * panel_size +
                                      (k * kPanelColumns + (v % 2) * 16) * kGroupBytes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512i all = broadcast(x + r * p.x_stride + k * kGroupBytes);
      for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], all, columns[v]);
    }
  };
  constexpr int64_t kUnrolled = 4;
  const int64_t rounds = groups / kUnrolled;
  const int64_t lines_per_round = rounds > 0 ? (lines + rounds - 1) / rounds : 0;
  const char* const end = ahead + lines * kLine;
  for (int64_t i = 0; i < rounds; ++i) {
    for (int64_t j = 0; j < lines_per_round && ahead < end; ++j, ahead += kLine)
      if constexpr (R <= kRowsFromL2)
        _mm_prefetch(ahead, _MM_HINT_T1);
      else
        _mm_prefetch(ahead, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int64_t u = 0; u < kUnrolled; ++u) add_group(i * kUnrolled + u);
  }
  for (int64_t k = rounds * kUnrolled; k < groups; ++k) add_group(k);
  for (int v = 0; v < V; ++v) {
    const int64_t column = panel * kPanelColumns + v * 16;
    if (column >= p.columns) break;
    const __mmask16 held = held_columns(column, p.columns);
    const __m512i excess =
        _mm512_slli_epi32(_mm512_maskz_loadu_epi32(held, p.column_sums + column), 7);
    const __m512 scales = _mm512_maskz_loadu_ps(held, p.column_scales + column);
    for (int r = 0; r < R; ++r)
      store(_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r][v], excess)),
                          _mm512_mul_ps(scales, _mm512_set1_ps(p.row_scales[row + r]))),
            p.bias, p.out, p.columns, row + r, column);
  }
}
// By rows; their sums, the columns and one broadcast fill the 32 registers.
constexpr Block kNarrow[] = {nullptr,      block<1, 1>,  block<2, 1>,  block<3, 1>,  block<4, 1>,
                             block<5, 1>,  block<6, 1>,  block<7, 1>,  block<8, 1>,  block<9, 1>,
                             block<10, 1>, block<11, 1>, block<12, 1>, block<13, 1>, block<14, 1>};
constexpr Block kWide[] = {nullptr,     block<1, 2>, block<2, 2>, block<3, 2>,
                           block<4, 2>, block<5, 2>, block<6, 2>};
// From 96 rows on arithmetic decides, and a wider block loads less for each product.
constexpr Blocks kBlocks = {kNarrow, 14, 14, kWide, 6, 96, 512, false};
}  // namespace

float round_row(const uint16_t* row, int64_t size, uint8_t* out, int64_t padded) {
  __m512 largest = _mm512_setzero_ps();
  for (int64_t k = 0; k < size; k += 16)
    largest = _mm512_max_ps(largest, _mm512_abs_ps(load_held(held_columns(k, size), row + k)));
  const float scale = _mm512_reduce_max_ps(largest) / 127.0f;
  const __m512 inverse = _mm512_set1_ps(scale > 0.0f ? 1.0f / scale : 0.0f);
  std::memset(out, 128, static_cast<size_t>(padded));
  for (int64_t k = 0; k < size; k += 16) {
    const __mmask16 held = held_columns(k, size);
    __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(load_held(held, row + k), inverse));
    rounded = _mm512_max_epi32(_mm512_min_epi32(rounded, _mm512_set1_epi32(127)),
                               _mm512_set1_epi32(-127));
    _mm512_mask_cvtepi32_storeu_epi8(out + k, held,
                                     _mm512_add_epi32(rounded, _mm512_set1_epi32(128)));
  }
  return scale;
}
const Blocks* int8_blocks_avx512() { return &kBlocks; }

}  // namespace specplug
#endif
