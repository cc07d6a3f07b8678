// SPDX-License-Identifier: Apache-2.0
// Body of one instruction-set variant. Included once per translation unit, after a
// `#pragma GCC target`, with
//   VEC_WORDS  lanes of 32 bits in one vector (4, 8 or 16)
//   MAX_ROWS   rows of the register block
//   MAX_PANELS panels of 16 columns of the register block (1 or 2)
//   BF16_DOT   1 if words are bf16 pairs; needs AVX-512 BF16
//   VEC_ROWS   1 for products over bf16 that is not packed; needs 16 lanes with BF16_DOT
// Everything here has internal linkage: the same names exist in every variant.

namespace {

typedef float VecF __attribute__((vector_size(VEC_WORDS * 4)));
typedef int32_t VecI __attribute__((vector_size(VEC_WORDS * 4)));
typedef uint32_t VecU __attribute__((vector_size(VEC_WORDS * 4)));
typedef float VecFu __attribute__((vector_size(VEC_WORDS * 4), aligned(4)));
typedef uint32_t VecUu __attribute__((vector_size(VEC_WORDS * 4), aligned(2)));

constexpr int kVecs = kPanel / VEC_WORDS;  // vectors in a panel row

ALWAYS_INLINE VecF load_f(const float* p) { return *reinterpret_cast<const VecFu*>(p); }
ALWAYS_INLINE void store_f(float* p, VecF v) { *reinterpret_cast<VecFu*>(p) = v; }

// acc + a b, of bf16 pairs or of floats.
ALWAYS_INLINE VecF dot_word(VecF acc, uint32_t a, VecU b) {
#if BF16_DOT
  const __m512i all = _mm512_set1_epi32(static_cast<int>(a));
  return reinterpret_cast<VecF>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc),
                                                 reinterpret_cast<__m512bh>(all),
                                                 reinterpret_cast<__m512bh>(b)));
#else
  float x;
  __builtin_memcpy(&x, &a, 4);
  return acc + x * reinterpret_cast<VecF>(b);
#endif
}

template <bool COARSE>
ALWAYS_INLINE VecF exp2_fraction(VecF x) {
  const VecF zero = {};
  if constexpr (COARSE) {
    // The weights are rounded to bf16: a cubic (7.5e-5) is far below that rounding.
    VecF p = zero + 0.0551716685295105f;
    p = p * x + 0.2426111251115799f;
    p = p * x + 0.6932609677314758f;
    return p * x + 0.9999280571937561f;
  }
  VecF p = zero + 0.0013276472454890609f;
  p = p * x + 0.009675540961325169f;
  p = p * x + 0.05550713092088699f;
  p = p * x + 0.24022120237350464f;
  p = p * x + 0.6931469440460205f;
  return p * x + 1.0000001192092896f;
}

// 2^x for x <= ~100; exactly 0 for -inf, NaN for NaN.
template <bool COARSE = BF16_DOT>
ALWAYS_INLINE VecF exp2_vec(VecF x) {
#if VEC_WORDS == 16
  // Scaling into the denormal range costs a microcode assist a vector, so such lanes are masked;
  // NaN is not, as whoever attends it is NaN.
  const __m512 at = reinterpret_cast<__m512>(x);
  const __mmask16 normal = _mm512_cmp_ps_mask(at, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
  const __m512 whole = _mm512_maskz_roundscale_ps(normal, at, 8);
  const VecF p = exp2_fraction<COARSE>(reinterpret_cast<VecF>(_mm512_sub_ps(at, whole)));
  return reinterpret_cast<VecF>(_mm512_maskz_scalef_ps(normal, reinterpret_cast<__m512>(p), whole));
#else
  const VecF zero = {};
  const VecF low = zero - 126.0f;
  const VecF clamped = x < low ? low : x;
  const VecF magic = zero + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
  const VecF shifted = clamped + magic;
  const VecF p = exp2_fraction<COARSE>(clamped - (shifted - magic));
  const VecI scaled = reinterpret_cast<VecI>(p) + (reinterpret_cast<VecI>(shifted) << 23);
  return x < low ? zero : reinterpret_cast<VecF>(scaled);
#endif
}

ALWAYS_INLINE float exp2_scalar(float x) {
  VecF v = {};
  return exp2_vec(v + x)[0];
}

// Halves a vector by f until one lane is left.
template <class F>
ALWAYS_INLINE float reduce_lanes(VecF v, const F& f) {
#if VEC_WORDS == 16
  const auto v8 = f(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                    __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
#elif VEC_WORDS == 8
  const auto v8 = v;
#endif
#if VEC_WORDS >= 8
  const auto v4 =
      f(__builtin_shufflevector(v8, v8, 0, 1, 2, 3), __builtin_shufflevector(v8, v8, 4, 5, 6, 7));
#else
  const auto v4 = v;
#endif
  const auto v2 = f(v4, __builtin_shufflevector(v4, v4, 2, 3, 0, 1));
  return f(v2[0], v2[1]);
}

ALWAYS_INLINE float max_lanes(VecF v) {
  return reduce_lanes(v,
                      [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}
ALWAYS_INLINE float sum_lanes(VecF v) {
  return reduce_lanes(v, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}

// ---- products --------------------------------------------------------------

// Every loop over the register block is unrolled by pragma: only then do the accumulators stay in
// registers.
#define UNROLL _Pragma("GCC unroll 16")

template <int ROWS, int PANELS>
ALWAYS_INLINE void zero_block(VecF (&acc)[ROWS][PANELS * kVecs]) {
  UNROLL for (int m = 0; m < ROWS; ++m)
    UNROLL for (int j = 0; j < PANELS * kVecs; ++j) acc[m][j] = VecF{};
}

template <int ROWS, int PANELS>
ALWAYS_INLINE void load_block(VecF (&acc)[ROWS][PANELS * kVecs], const float* c, int64_t ld) {
  UNROLL for (int m = 0; m < ROWS; ++m)
    UNROLL for (int j = 0; j < PANELS * kVecs; ++j) acc[m][j] = load_f(c + m * ld + j * VEC_WORDS);
}

template <int ROWS, int PANELS>
ALWAYS_INLINE void store_block(const VecF (&acc)[ROWS][PANELS * kVecs], float* c, int64_t ld) {
  UNROLL for (int m = 0; m < ROWS; ++m)
    UNROLL for (int j = 0; j < PANELS * kVecs; ++j) store_f(c + m * ld + j * VEC_WORDS, acc[m][j]);
}

template <int ROWS, int PANELS>
ALWAYS_INLINE void multiply_block(VecF (&acc)[ROWS][PANELS * kVecs], const uint32_t* a, int64_t ld_a,
                           const char* b, int64_t panel, int64_t row, int words) {
  for (int k = 0; k < words; ++k) {
    VecU col[PANELS * kVecs];
    UNROLL for (int p = 0; p < PANELS; ++p)
      UNROLL for (int j = 0; j < kVecs; ++j)
        col[p * kVecs + j] = *reinterpret_cast<const VecUu*>(b + p * panel + j * VEC_WORDS * 4);
    UNROLL for (int m = 0; m < ROWS; ++m)
      UNROLL for (int j = 0; j < PANELS * kVecs; ++j)
        acc[m][j] = dot_word(acc[m][j], a[m * ld_a + k], col[j]);
    b += row;
  }
}

template <int ROWS, int PANELS>
void scores_block(const uint32_t* q, int64_t ld_q, int words, const KvGroup* groups,
                  int num_groups, float* s, int64_t ld_s) {
  for (int g = 0; g < num_groups; ++g)
    for (int p = 0; p < kGroup / kPanel; p += PANELS) {
      VecF acc[ROWS][PANELS * kVecs];
      zero_block<ROWS, PANELS>(acc);
      multiply_block<ROWS, PANELS>(acc, q, ld_q, groups[g].k + p * groups[g].k_panel,
                                   groups[g].k_panel, groups[g].k_row, words);
      store_block<ROWS, PANELS>(acc, s + g * kGroup + p * kPanel, ld_s);
    }
}

constexpr int kGroupWords = BF16_DOT ? kGroup / 2 : kGroup;

template <int ROWS, int PANELS>
void values_block(const uint32_t* p, int64_t ld_p, const KvGroup* groups, int num_groups,
                  int panel, bool first, float* o, int64_t ld_o) {
  VecF acc[ROWS][PANELS * kVecs];
  if (first)
    zero_block<ROWS, PANELS>(acc);
  else
    load_block<ROWS, PANELS>(acc, o, ld_o);
  for (int g = 0; g < num_groups; ++g)
    multiply_block<ROWS, PANELS>(acc, p + g * kGroupWords, ld_p,
                                 groups[g].v + panel * groups[g].v_panel, groups[g].v_panel,
                                 groups[g].v_row, kGroupWords);
  store_block<ROWS, PANELS>(acc, o, ld_o);
}

// Calls f<ROWS> for the run-time number of rows.
template <int ROWS, class F>
ALWAYS_INLINE void with_rows(int rows, const F& f) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return with_rows<ROWS - 1>(rows, f);
  }
  f(std::integral_constant<int, ROWS>{});
}

// Splits rows into blocks of nearly equal height: 27 rows become 9+9+9, not 12+12+3.
template <class F>
ALWAYS_INLINE void for_row_blocks(int rows, const F& f) {
  const int blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
  int done = 0;
  for (int i = 0; i < blocks; ++i) {
    const int n = (rows - done + blocks - i - 1) / (blocks - i);
    with_rows<MAX_ROWS>(n, [&](auto height) { f(height, done); });
    done += n;
  }
}

void scores(const uint32_t* q, int64_t ld_q, int rows, int words, const KvGroup* groups,
            int num_groups, float* s, int64_t ld_s) {
  for_row_blocks(rows, [&](auto height, int m) {
    scores_block<decltype(height)::value, MAX_PANELS>(q + m * ld_q, ld_q, words, groups,
                                                      num_groups, s + m * ld_s, ld_s);
  });
}

void values(const uint32_t* p, int64_t ld_p, int rows, const KvGroup* groups, int num_groups,
            int head_size, bool first, float* o) {
  const int panels = head_size / kPanel;
  for_row_blocks(rows, [&](auto height, int m) {
    constexpr int kRows = decltype(height)::value;
    int panel = 0;
    for (; panel + MAX_PANELS <= panels; panel += MAX_PANELS)
      values_block<kRows, MAX_PANELS>(p + m * ld_p, ld_p, groups, num_groups, panel, first,
                                      o + m * head_size + panel * kPanel, head_size);
    if (MAX_PANELS > 1 && panel < panels)
      values_block<kRows, 1>(p + m * ld_p, ld_p, groups, num_groups, panel, first,
                             o + m * head_size + panel * kPanel, head_size);
  });
}

#if VEC_ROWS
// ---- products over rows that are not packed --------------------------------
//
// A few rows are multiplied in less time than memory takes to answer, and hardware follows neither
// the strides of keys nor the order of blocks. So while keys are multiplied, the values of the same
// slots are asked for, which begin at the group's `v` and lie without gaps, and while values are
// multiplied the keys that come next.

ALWAYS_INLINE void ask_for(const char* line) { _mm_prefetch(line, _MM_HINT_T1); }

// Numbers of a row that are multiplied at once: two vectors.
constexpr int kRowVecs = 2, kRowNumbers = kRowVecs * VEC_WORDS;
#endif

#if VEC_ROWS && BF16_DOT
// Unpacking two rows of 32 leaves columns 8i to 8i + 3 in lane i of the low half and the next four
// in that of the high half: where each half's words are in 32 columns, and the other way round.
struct Interleaved {
  __m512i first, second, low, high;

  ALWAYS_INLINE Interleaved get() {
    alignas(64) int32_t at[4][16];
    for (int i = 0; i < 16; ++i) {
      const int in_half = 4 * (i / 8) + i % 4 + (i % 8 < 4 ? 0 : 16);
      at[0][i] = in_half;
      at[1][i] = in_half + 8;
      at[2][i] = 8 * (i / 4) + i % 4;
      at[3][i] = at[2][i] + 4;
    }
    return {_mm512_load_si512(at[0]), _mm512_load_si512(at[1]), _mm512_load_si512(at[2]),
            _mm512_load_si512(at[3])};
  }
};

ALWAYS_INLINE __m512 pick(VecF low, __m512i at, VecF high) {
  return _mm512_permutex2var_ps(reinterpret_cast<__m512>(low), at,
                                reinterpret_cast<__m512>(high));
}

// acc += a[m] . (row `one` and the row after it); two vectors of words in interleaved order.
template <int ROWS>
ALWAYS_INLINE void multiply_rows(VecF (&low)[ROWS], VecF (&high)[ROWS], const uint32_t* a, int64_t ld_a,
                          __m512i one, __m512i other) {
  const VecU first = reinterpret_cast<VecU>(_mm512_unpacklo_epi16(one, other));
  const VecU second = reinterpret_cast<VecU>(_mm512_unpackhi_epi16(one, other));
  UNROLL for (int m = 0; m < ROWS; ++m) {
    low[m] = dot_word(low[m], a[m * ld_a], first);
    high[m] = dot_word(high[m], a[m * ld_a], second);
  }
}

// Of values, 2 lines of 64 bytes for each word of the head dimension.
template <int ROWS, bool ASKS>
void vec_scores_block(const uint32_t* q, int64_t ld_q, int words, const KvGroup* groups,
                      int num_groups, float* s, int64_t ld_s) {
  const Interleaved order = Interleaved::get();
  for (int g = 0; g < num_groups; ++g) {
    VecF low[ROWS] = {}, high[ROWS] = {};
    const char* k = groups[g].k;
    const int64_t k_row = groups[g].k_row;
    for (int w = 0; w < words; ++w, k += 2 * k_row) {
      if constexpr (ASKS) {
        ask_for(groups[g].v + w * 128);
        ask_for(groups[g].v + w * 128 + 64);
      }
      multiply_rows<ROWS>(low, high, q + w, ld_q, _mm512_loadu_si512(k),
                          _mm512_loadu_si512(k + k_row));
    }
    UNROLL for (int m = 0; m < ROWS; ++m) {
      _mm512_storeu_ps(s + m * ld_s + g * kGroup, pick(low[m], order.first, high[m]));
      _mm512_storeu_ps(s + m * ld_s + g * kGroup + kPanel, pick(low[m], order.second, high[m]));
    }
  }
}

// 32 head dims from `dim` on. Meanwhile keys of `next` are asked for: a share of the head's dims.
template <int ROWS, bool ASKS>
void vec_values_block(const uint32_t* p, int64_t ld_p, const KvGroup* groups, int num_groups,
                      int dim, bool first, float* o, int64_t ld_o, const KvGroup* next,
                      int num_next) {
  const Interleaved order = Interleaved::get();
  VecF low[ROWS] = {}, high[ROWS] = {};
  if (!first)
    UNROLL for (int m = 0; m < ROWS; ++m) {
      const VecF x = load_f(o + m * ld_o), y = load_f(o + m * ld_o + kPanel);
      low[m] = reinterpret_cast<VecF>(pick(x, order.low, y));
      high[m] = reinterpret_cast<VecF>(pick(x, order.high, y));
    }
  for (int g = 0; g < num_groups; ++g) {
    const char* v = groups[g].v + dim * 2;
    const int64_t v_row = groups[g].v_row;
    const uint32_t* weights = p + g * kGroupWords;
    const int pairs = groups[g].valid / 2;
    if (ASKS && g < num_next) {
      // The group's 32 dims of keys, 2 for each pair of slots.
      const char* k = next[g].k + dim * next[g].k_row;
      const int64_t k_row = next[g].k_row;
      for (int i = 0; i < pairs; ++i, v += 2 * v_row, k += 2 * k_row) {
        ask_for(k);
        ask_for(k + k_row);
        multiply_rows<ROWS>(low, high, weights + i, ld_p, _mm512_loadu_si512(v),
                            _mm512_loadu_si512(v + v_row));
      }
    } else {
      for (int i = 0; i < pairs; ++i, v += 2 * v_row)
        multiply_rows<ROWS>(low, high, weights + i, ld_p, _mm512_loadu_si512(v),
                            _mm512_loadu_si512(v + v_row));
    }
    // The slot after the last may hold NaN, and 0 x NaN is NaN.
    if (groups[g].valid % 2)
      multiply_rows<ROWS>(low, high, weights + pairs, ld_p, _mm512_loadu_si512(v),
                          _mm512_setzero_si512());
  }
  UNROLL for (int m = 0; m < ROWS; ++m) {
    _mm512_storeu_ps(o + m * ld_o, pick(low[m], order.first, high[m]));
    _mm512_storeu_ps(o + m * ld_o + kPanel, pick(low[m], order.second, high[m]));
  }
}

// The slots of one row, `count` of them from an even column on, wherever their values are.
void vec_row_values(const uint32_t* p, const char* const* v, int count, int head_size, float* o) {
  const Interleaved order = Interleaved::get();
  for (int dim = 0; dim < head_size; dim += kGroup) {
    const VecF x = load_f(o + dim), y = load_f(o + dim + kPanel);
    VecF low[1] = {reinterpret_cast<VecF>(pick(x, order.low, y))};
    VecF high[1] = {reinterpret_cast<VecF>(pick(x, order.high, y))};
    for (int i = 0; i < count; i += 2)
      multiply_rows<1>(low, high, p + i / 2, 1, _mm512_loadu_si512(v[i] + dim * 2),
                       i + 1 < count ? _mm512_loadu_si512(v[i + 1] + dim * 2)
                                     : _mm512_setzero_si512());
    _mm512_storeu_ps(o + dim, pick(low[0], order.first, high[0]));
    _mm512_storeu_ps(o + dim + kPanel, pick(low[0], order.second, high[0]));
  }
}

#elif VEC_ROWS
typedef uint16_t VecHu __attribute__((vector_size(VEC_WORDS * 2), aligned(2)));

ALWAYS_INLINE VecF load_bf16(const char* p) {
  return reinterpret_cast<VecF>(
      __builtin_convertvector(*reinterpret_cast<const VecHu*>(p), VecU) << 16);
}

// acc += a[m] * kRowNumbers numbers of bf16.
template <int ROWS>
ALWAYS_INLINE void multiply_row(VecF (&acc)[ROWS][kRowVecs], const uint32_t* a, int64_t ld_a,
                         const char* row) {
  VecF numbers[kRowVecs];
  UNROLL for (int j = 0; j < kRowVecs; ++j) numbers[j] = load_bf16(row + j * VEC_WORDS * 2);
  UNROLL for (int m = 0; m < ROWS; ++m) {
    float x;
    __builtin_memcpy(&x, a + m * ld_a, 4);
    UNROLL for (int j = 0; j < kRowVecs; ++j) acc[m][j] += x * numbers[j];
  }
}

// kRowNumbers slots at a time. Of values, a line of 64 bytes for each head dim.
template <int ROWS, bool ASKS>
void vec_scores_block(const uint32_t* q, int64_t ld_q, int words, const KvGroup* groups,
                      int num_groups, float* s, int64_t ld_s) {
  for (int g = 0; g < num_groups; ++g)
    for (int part = 0; part < kGroup / kRowNumbers; ++part) {
      VecF acc[ROWS][kRowVecs];
      zero_block<ROWS, kRowNumbers / kPanel>(acc);
      const char* k = groups[g].k + part * kRowNumbers * 2;
      for (int w = 0; w < words; ++w, k += groups[g].k_row) {
        if (ASKS && part == 0) ask_for(groups[g].v + w * 64);
        multiply_row<ROWS>(acc, q + w, ld_q, k);
      }
      store_block<ROWS, kRowNumbers / kPanel>(acc, s + g * kGroup + part * kRowNumbers, ld_s);
    }
}

// kRowNumbers head dims from `dim` on. Meanwhile their keys of `next` are asked for.
template <int ROWS, bool ASKS>
void vec_values_block(const uint32_t* p, int64_t ld_p, const KvGroup* groups, int num_groups,
                      int dim, bool first, float* o, int64_t ld_o, const KvGroup* next,
                      int num_next) {
  VecF acc[ROWS][kRowVecs];
  if (first)
    zero_block<ROWS, kRowNumbers / kPanel>(acc);
  else
    load_block<ROWS, kRowNumbers / kPanel>(acc, o, ld_o);
  for (int g = 0; g < num_groups; ++g) {
    if (ASKS && g < num_next)
      for (int d = dim; d < dim + kRowNumbers; ++d) ask_for(next[g].k + d * next[g].k_row);
    // Of slots after the last nothing is read: they may hold NaN, and 0 x NaN is NaN.
    const char* v = groups[g].v + dim * 2;
    for (int i = 0; i < groups[g].valid; ++i, v += groups[g].v_row)
      multiply_row<ROWS>(acc, p + g * kGroupWords + i, ld_p, v);
  }
  store_block<ROWS, kRowNumbers / kPanel>(acc, o, ld_o);
}

// The slots of one row, `count` of them, wherever their values are.
void vec_row_values(const uint32_t* p, const char* const* v, int count, int head_size, float* o) {
  for (int dim = 0; dim < head_size; dim += kRowNumbers) {
    VecF acc[1][kRowVecs];
    load_block<1, kRowNumbers / kPanel>(acc, o + dim, 0);
    for (int i = 0; i < count; ++i) multiply_row<1>(acc, p + i, 0, v[i] + dim * 2);
    store_block<1, kRowNumbers / kPanel>(acc, o + dim, 0);
  }
}
#endif

#if VEC_ROWS
void vec_scores(const uint32_t* q, int64_t ld_q, int rows, int words, const KvGroup* groups,
                int num_groups, float* s, int64_t ld_s, bool asks) {
  for_row_blocks(rows, [&](auto height, int m) {
    constexpr int kRows = decltype(height)::value;
    const auto block = asks && m == 0 ? vec_scores_block<kRows, true> : vec_scores_block<kRows, false>;
    block(q + m * ld_q, ld_q, words, groups, num_groups, s + m * ld_s, ld_s);
  });
}

void vec_values(const uint32_t* p, int64_t ld_p, int rows, const KvGroup* groups, int num_groups,
                int head_size, bool first, float* o, const KvGroup* next, int num_next) {
  for_row_blocks(rows, [&](auto height, int m) {
    constexpr int kRows = decltype(height)::value;
    const auto block =
        num_next > 0 && m == 0 ? vec_values_block<kRows, true> : vec_values_block<kRows, false>;
    for (int dim = 0; dim < head_size; dim += kRowNumbers)
      block(p + m * ld_p, ld_p, groups, num_groups, dim, first, o + m * head_size + dim, head_size,
            next, num_next);
  });
}
#else
constexpr decltype(AttnVariant::vec_scores) vec_scores = nullptr;
constexpr decltype(AttnVariant::vec_values) vec_values = nullptr;
constexpr decltype(AttnVariant::vec_row_values) vec_row_values = nullptr;
#endif

// ---- softmax ---------------------------------------------------------------

ALWAYS_INLINE VecF tanh_vec(VecF x) {
  const VecF zero = {};
  const VecF size = x < zero ? -x : x;
  const VecF square = x * x;
  // Below 1/4, where 1 - e would cancel, the first terms of the series.
  VecF series = zero - 1382.0f / 155925.0f;
  series = series * square + 62.0f / 2835.0f;
  series = series * square - 17.0f / 315.0f;
  series = series * square + 2.0f / 15.0f;
  series = series * square - 1.0f / 3.0f;
  series = x + x * square * series;
  const VecF e = exp2_vec<false>(size * -2.8853900817779268f);
  const VecF far = (1.0f - e) / (1.0f + e);
  return size < zero + 0.25f ? series : x < zero ? -far : far;
}

void reshape(float* s, int64_t ld_s, int rows, int cols, float scale, float cap) {
  const float inner = scale / (cap > 0.0f ? cap : 1.0f);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < cols; c += VEC_WORDS) {
      float* at = s + r * ld_s + c;
      const VecF x = load_f(at) * inner;
      store_f(at, cap > 0.0f ? tanh_vec(x) * cap : x);
    }
}

void mask(float* s, int64_t ld_s, int rows, const uint32_t* bits) {
  VecU lane;
  for (int i = 0; i < VEC_WORDS; ++i) lane[i] = 1u << i;
  const VecU none = {};
  const VecF minus_inf = VecF{} - __builtin_inff();
  for (int m = 0; m < rows; ++m) {
    if (bits[m] == 0xffffffffu) continue;
    for (int j = 0; j < kGroup / VEC_WORDS; ++j) {
      float* at = s + m * ld_s + j * VEC_WORDS;
      const VecU set = (none + (bits[m] >> (j * VEC_WORDS))) & lane;
      // A select, not an addition: an unused slot may hold NaN.
      store_f(at, set != none ? load_f(at) : minus_inf);
    }
  }
}

// The reference exponent m of a row only moves when the maximum has grown by more than 2^8:
// weights stay within fp32 (and bf16 keeps its relative precision), and o is seldom rescaled.
constexpr float kRescaleAbove = 8.0f;

#if BF16_DOT
ALWAYS_INLINE void store_bf16(uint16_t* p, VecF v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(v))));
}
#endif

ALWAYS_INLINE void store_weights(uint32_t* p, int64_t col, VecF w) {
#if BF16_DOT
  store_bf16(reinterpret_cast<uint16_t*>(p) + col, w);
#else
  store_f(reinterpret_cast<float*>(p) + col, w);
#endif
}

void softmax(float* s, int64_t ld_s, int rows, int cols, float scale_log2, bool first, float* m,
             float* l, float* o, int head_size, uint32_t* p, int64_t ld_p) {
  for (int r = 0; r < rows; ++r) {
    const float* row = s + r * ld_s;
    VecF top = load_f(row);
    VecF top2 = load_f(row + VEC_WORDS);
    for (int c = 2 * VEC_WORDS; c < cols; c += 2 * VEC_WORDS) {
      const VecF x = load_f(row + c);
      const VecF y = load_f(row + c + VEC_WORDS);
      top = x > top ? x : top;
      top2 = y > top2 ? y : top2;
    }
    const float peak = max_lanes(top > top2 ? top : top2) * scale_log2;
    if (first) {
      m[r] = peak > kNoScore ? peak : kNoScore;
      l[r] = 0.0f;
    } else if (peak > m[r] + kRescaleAbove) {
      const float alpha = exp2_scalar(m[r] - peak);
      m[r] = peak;
      l[r] *= alpha;
      for (int d = 0; d < head_size; d += VEC_WORDS)
        store_f(o + r * head_size + d, load_f(o + r * head_size + d) * alpha);
    }
    const float shift = m[r];
    VecF sum = {};
#pragma GCC unroll 4
    for (int c = 0; c < cols; c += VEC_WORDS) {
      const VecF w = exp2_vec(load_f(row + c) * scale_log2 - shift);
      sum += w;
      store_weights(p + r * ld_p, c, w);
    }
    l[r] += sum_lanes(sum);
  }
}

// ---- packing ---------------------------------------------------------------

template <class Src, class K, class V>
ALWAYS_INLINE void pack_with(const K& k_at, const V& v_at, int valid, int half, int head_size,
                      int padded_words, void* k_dst, void* v_dst, bool k_readable) {
  uint32_t* k = static_cast<uint32_t*>(k_dst) + half * kPanel * (int64_t)padded_words;
  uint32_t* v = static_cast<uint32_t*>(v_dst);
  // Slots past `valid` may hold anything: their K may be read when it is inside a block (scores
  // are masked later), their V never (0 x NaN).
  const int k_valid = k_readable ? kPanel : valid;
#if BF16_DOT
  static_assert(sizeof(Src) == 2, "bf16 variants only see bf16 caches");
  for (int d = 0; d < head_size; d += 2) {
    uint32_t* out = k + d / 2 * kPanel;
    if (k_valid == kPanel)
      for (int t = 0; t < kPanel; ++t)
        out[t] = static_cast<uint32_t>(k_at(t, d)) | static_cast<uint32_t>(k_at(t, d + 1)) << 16;
    else
      for (int t = 0; t < kPanel; ++t)
        out[t] = t < k_valid ? static_cast<uint32_t>(k_at(t, d)) |
                                   static_cast<uint32_t>(k_at(t, d + 1)) << 16
                             : 0;
  }
  for (int w = head_size / 2; w < padded_words; ++w)
    for (int t = 0; t < kPanel; ++t) k[w * kPanel + t] = 0;
  for (int panel = 0; panel < head_size / kPanel; ++panel)
    for (int t = 0; t < kPanel; t += 2) {
      uint32_t* out = v + (panel * kPanel + (half * kPanel + t) / 2) * kPanel;
      const int d0 = panel * kPanel;
      if (t + 1 < valid)
        for (int d = 0; d < kPanel; ++d)
          out[d] = static_cast<uint32_t>(v_at(t, d0 + d)) |
                   static_cast<uint32_t>(v_at(t + 1, d0 + d)) << 16;
      else
        for (int d = 0; d < kPanel; ++d)
          out[d] = t < valid ? static_cast<uint32_t>(v_at(t, d0 + d)) : 0;
    }
#else
  for (int d = 0; d < head_size; ++d) {
    uint32_t* out = k + d * kPanel;
    if (k_valid == kPanel)
      for (int t = 0; t < kPanel; ++t) out[t] = word_of(k_at(t, d));
    else
      for (int t = 0; t < kPanel; ++t) out[t] = t < k_valid ? word_of(k_at(t, d)) : 0;
  }
  for (int t = 0; t < kPanel; ++t) {
    uint32_t* out = v + (half * kPanel + t) * static_cast<int64_t>(head_size);
    if (t < valid)
      for (int d = 0; d < head_size; ++d) out[d] = word_of(v_at(t, d));
    else
      for (int d = 0; d < head_size; ++d) out[d] = 0;
  }
#endif
}

template <class Src>
void pack_typed(const PackSource& src, int half, int head_size, int padded_words, void* k_dst,
                void* v_dst) {
  const Src* k = static_cast<const Src*>(src.k);
  const Src* v = static_cast<const Src*>(src.v);
  if (src.kind == PackSource::kVec) {
    const int block_size = src.block_size;
    k += src.first;
    v += static_cast<int64_t>(src.first) * head_size;
    pack_with<Src>([&](int t, int d) { return k[static_cast<int64_t>(d) * block_size + t]; },
                   [&](int t, int d) { return v[static_cast<int64_t>(t) * head_size + d]; },
                   src.valid, half, head_size, padded_words, k_dst, v_dst, true);
  } else if (src.kind == PackSource::kTable) {
    const int32_t* kt = src.k_table + static_cast<int64_t>(src.first) * head_size;
    const int32_t* vt = src.v_table + static_cast<int64_t>(src.first) * head_size;
    pack_with<Src>([&](int t, int d) { return k[kt[t * head_size + d]]; },
                   [&](int t, int d) { return v[vt[t * head_size + d]]; }, src.valid, half,
                   head_size, padded_words, k_dst, v_dst, true);
  } else {
    pack_with<Src>([&](int t, int d) { return k[t * src.k_stride + d]; },
                   [&](int t, int d) { return v[t * src.v_stride + d]; }, src.valid, half,
                   head_size, padded_words, k_dst, v_dst, false);
  }
}

void pack(const PackSource& src, [[maybe_unused]] Element element, int half, int head_size,
          int padded_words, void* k_dst, void* v_dst) {
#if !BF16_DOT
  if (element == Element::kFloat)
    return pack_typed<uint32_t>(src, half, head_size, padded_words, k_dst, v_dst);
  if (element == Element::kFloat16)
    return pack_typed<Float16>(src, half, head_size, padded_words, k_dst, v_dst);
  if (element == Element::kE4m3)
    return pack_typed<E4m3>(src, half, head_size, padded_words, k_dst, v_dst);
  if (element == Element::kE5m2)
    return pack_typed<E5m2>(src, half, head_size, padded_words, k_dst, v_dst);
#endif
  pack_typed<uint16_t>(src, half, head_size, padded_words, k_dst, v_dst);
}

// ---- output ----------------------------------------------------------------

ALWAYS_INLINE uint16_t round_bf16(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (u >> 16) | 0x40u;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

ALWAYS_INLINE void write_row(const float* o, float factor, int head_size, const RowTarget& target,
                      int64_t at) {
  if (target.element == Element::kFloat16) {
    uint16_t* out = static_cast<uint16_t*>(target.base) + at;
    for (int d = 0; d < head_size; ++d) out[d] = round_float16(o[d] * factor);
  } else if (target.element == Element::kBfloat16) {
    uint16_t* out = static_cast<uint16_t*>(target.base) + at;
#if BF16_DOT
    for (int d = 0; d < head_size; d += VEC_WORDS) store_bf16(out + d, load_f(o + d) * factor);
#else
    for (int d = 0; d < head_size; ++d) out[d] = round_bf16(o[d] * factor);
#endif
  } else {
    float* out = static_cast<float*>(target.base) + at;
    for (int d = 0; d < head_size; ++d) out[d] = o[d] * factor;
  }
}

void write(const float* o, const float* l, int rows, int head_size, const RowTarget& target,
           int first_row) {
  int64_t row = first_row / target.group_size;
  int head = first_row % target.group_size;
  for (int r = 0; r < rows; ++r) {
    write_row(o + static_cast<int64_t>(r) * head_size, target.factor / l[r], head_size, target,
              row * target.row_stride + head * target.head_stride);
    if (++head == target.group_size) head = 0, ++row;
  }
}

// 2^(of - top), exactly 1 where they are one reference.
ALWAYS_INLINE float reference_weight(float of, float top) {
  return of == top ? 1.0f : exp2_vec<false>(VecF{} + (of - top))[0];
}

void merge(const Partial& to, const Partial& from, int rows, int head_size) {
  for (int r = 0; r < rows; ++r) {
    // Nothing was attended; a sum of NaN is a row's that attends NaN and counts.
    if (from.l[r] == 0.0f) continue;
    float* o = to.o + static_cast<int64_t>(r) * head_size;
    const float* more = from.o + static_cast<int64_t>(r) * head_size;
    if (to.l[r] == 0.0f) {
      to.m[r] = from.m[r];
      to.l[r] = from.l[r];
      __builtin_memcpy(o, more, static_cast<size_t>(head_size) * 4);
      continue;
    }
    const float top = to.m[r] > from.m[r] ? to.m[r] : from.m[r];
    const float own = reference_weight(to.m[r], top), other = reference_weight(from.m[r], top);
    to.m[r] = top;
    to.l[r] = own * to.l[r] + other * from.l[r];
    for (int d = 0; d < head_size; ++d) o[d] = own * o[d] + other * more[d];
  }
}

void no_state() {}

constexpr AttnVariant make_variant(const char* name) {
  return {name,   BF16_DOT != 0, no_state, no_state,   scores,     reshape,        mask, softmax,
          values, vec_scores,    vec_values, vec_row_values, pack, write, merge};
}

}  // namespace
