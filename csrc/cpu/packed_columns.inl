// SPDX-License-Identifier: Apache-2.0
// Shared parts of products of 16 columns with AVX-512. Included where the target is set. With
// BF16_DOT, which needs AVX-512 BF16, an instruction multiplies pairs of bfloat16 numbers; without
// it, their float32 values one after the other. GCC's own macro for the instruction set is not set
// by a pragma in C++.
#ifndef BF16_DOT
#error "BF16_DOT must be 0 or 1"
#endif

// GCC 12's headers make an undefined vector by initialising it with itself.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace specplug {
namespace {

ALWAYS_INLINE __m512i broadcast(const char* x) {
  int32_t group;
  std::memcpy(&group, x, sizeof(group));
  return _mm512_set1_epi32(group);
}

#if BF16_DOT
constexpr bool kTakesTiles = false;
constexpr int64_t kNumberBytes = 2;  // of a row
// Registers that hold sums; the others hold what is multiplied.
constexpr int kSumRegisters = 28;

// Two numbers of depth of each of 16 columns.
using Pairs = __m512i;

ALWAYS_INLINE Pairs make_pairs(__m512i words) { return words; }

// Bytes between the pairs of a row.
ALWAYS_INLINE int64_t pair_step(int64_t) { return kGroupBytes; }

// Adds the products of row r's pair at x, and of V vectors of columns.
template <int V>
ALWAYS_INLINE void add_products(__m512 (&sums)[V], const Pairs (&columns)[V], const char* x, int r,
                                int64_t x_stride) {
  const __m512i row = broadcast(x + r * x_stride);
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v)
    sums[v] = _mm512_dpbf16_ps(sums[v], reinterpret_cast<__m512bh>(columns[v]),
                               reinterpret_cast<__m512bh>(row));
}

ALWAYS_INLINE __m256i round_bf16(__m512 numbers) {
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(numbers));
}
#else
constexpr bool kTakesTiles = true;
constexpr int64_t kNumberBytes = 4;
constexpr int kSumRegisters = 24;

struct Pairs {
  __m512 even, odd;
};

ALWAYS_INLINE Pairs make_pairs(__m512i words) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
          _mm512_castsi512_ps(_mm512_maskz_mov_epi16(0xaaaaaaaa, words))};
}

ALWAYS_INLINE int64_t pair_step(int64_t x_stride) { return 2 * x_stride; }

// Instructions that stay where they are: GCC 12 otherwise reads numbers of rows ahead, and moves
// sums to memory for them.
ALWAYS_INLINE __m512 broadcast_float(const char* x) {
  __m512 all;
  asm volatile("vbroadcastss %1, %0" : "=v"(all) : "m"(*reinterpret_cast<const float*>(x)));
  return all;
}

ALWAYS_INLINE void add_product(__m512& sums, __m512 columns, __m512 row) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+v"(sums) : "v"(columns), "v"(row));
}

template <int V>
ALWAYS_INLINE void add_products(__m512 (&sums)[V], const Pairs (&columns)[V], const char* x, int r,
                                int64_t x_stride) {
  const int64_t at = r * static_cast<int64_t>(sizeof(float));
  const __m512 even = broadcast_float(x + at);
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) add_product(sums[v], columns[v].even, even);
  const __m512 odd = broadcast_float(x + x_stride + at);
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) add_product(sums[v], columns[v].odd, odd);
}

// Ties to even; NaN stays NaN.
ALWAYS_INLINE __m256i round_bf16(__m512 numbers) {
  const __m512i bits = _mm512_castps_si512(numbers);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_mov_epi32(up, is_nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
#endif

// The first of 16 columns from `column` on that a weight has.
ALWAYS_INLINE __mmask16 held_columns(int64_t column, int64_t columns) {
  return static_cast<__mmask16>((1u << std::clamp<int64_t>(columns - column, 0, 16)) - 1u);
}

// Numbers of bfloat16, with zeros where they are not held.
ALWAYS_INLINE __m512 load_held(__mmask16 held, const uint16_t* from) {
  const __m512i words = _mm512_maskz_cvtepu16_epi32(held, _mm256_maskz_loadu_epi16(held, from));
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(held, words, 16));
}

// A row's sums of 16 columns from `column` on, with their bias, as bfloat16 [rows, columns].
ALWAYS_INLINE void store(__m512 sums, const uint16_t* bias, uint16_t* out, int64_t columns,
                         int64_t row, int64_t column) {
  const __mmask16 held = held_columns(column, columns);
  if (bias != nullptr) sums = _mm512_add_ps(sums, load_held(held, bias + column));
  _mm256_mask_storeu_epi16(out + row * columns + column, held, round_bf16(sums));
}

}  // namespace
}  // namespace specplug
