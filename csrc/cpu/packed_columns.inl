// SPDX-License-Identifier: Apache-2.0
// What products of 16 columns with AVX-512 have in common. Included where the target is set.

namespace specplug {
namespace {

inline __attribute__((always_inline)) __m512i broadcast(const char* x) {
  int32_t group;
  std::memcpy(&group, x, sizeof(group));
  return _mm512_set1_epi32(group);
}

// The first of 16 columns from `column` on that a weight has.
inline __attribute__((always_inline)) __mmask16 held_columns(int64_t column, int64_t columns) {
  return static_cast<__mmask16>((1u << std::clamp<int64_t>(columns - column, 0, 16)) - 1u);
}

// A row's sums of 16 columns from `column` on, with their bias, as bfloat16 [rows, columns].
inline __attribute__((always_inline)) void store(__m512 sums, const uint16_t* bias, uint16_t* out,
                                                 int64_t columns, int64_t row, int64_t column) {
  const __mmask16 held = held_columns(column, columns);
  if (bias != nullptr) {
    const __m512i words =
        _mm512_maskz_cvtepu16_epi32(held, _mm256_maskz_loadu_epi16(held, bias + column));
    sums = _mm512_add_ps(sums, _mm512_castsi512_ps(_mm512_maskz_slli_epi32(held, words, 16)));
  }
  _mm256_mask_storeu_epi16(out + row * columns + column, held,
                           reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sums)));
}

}  // namespace
}  // namespace specplug
