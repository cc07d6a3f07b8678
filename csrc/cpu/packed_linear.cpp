// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 rows with a packed weight, in bfloat16 (AVX-512 BF16) or int8 (VNNI), for
// the row counts of decoding.
//
// A step of decoding reads every weight once, and its few rows should cost nothing beside that
// read: a panel of the weight streams through once while the sums of up to 14 rows stay in
// registers, and the memory behind it is asked for ahead. Every number is the sum over k, in order,
// in one register, so a row's result depends neither on the other rows nor on the number of
// threads.
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>

#include "isa.h"
#include "packed_linear.h"

namespace specplug {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// An instruction multiplies 4 bytes of a row, two bfloat16 or four int8 numbers, with as many of
// each of 16 columns. A panel holds the columns of two vectors of sums: [groups of 4 bytes, 32, 4
// bytes].
constexpr int64_t kPanel = 32;
constexpr int64_t kGroupBytes = 4;
// Bytes between what is read and what is asked for, while one block of rows streams panels.
constexpr int64_t kAhead = 16384;
constexpr int64_t kLine = 64;

struct Product {
  const char* x;         // [M, groups] of 4 bytes, rows of `x_stride` bytes
  const char* weight;    // [panels, groups, 32] of 4 bytes
  const uint16_t* bias;  // [N] or null
  uint16_t* out;         // [M, N]
  int64_t rows, columns, groups, x_stride;
  // Of int8 products alone. Rows are stored with 128 added, as the instruction has it: a sum is
  // too large by 128 times the column's.
  const float* row_scales = nullptr;     // [M]
  const float* column_scales = nullptr;  // [N]
  const int32_t* column_sums = nullptr;  // [N]
};

#if defined(__x86_64__)
// GCC 12's headers make an undefined vector by initialising it with itself.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,bmi2,prefer-vector-width=512")

struct Bf16 {
  using Sums = __m512;
  static constexpr int kRowsFromL2 = 0;
  static inline __attribute__((always_inline)) Sums add(Sums sums, __m512i row, __m512i columns) {
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(row),
                            reinterpret_cast<__m512bh>(columns));
  }
  static inline __attribute__((always_inline)) __m512 value(const Product&, Sums sums, int64_t,
                                                            int64_t, __mmask16) {
    return sums;
  }
};

// Up to 8 rows are done with a line before the next one comes: the few lines that the first cache
// can wait for at once then hold the panel up, and what is asked for goes to the second. (Zen
// 4: 9.4 MB by 7 rows take 0.40 ms in place of 0.70; bfloat16, twice as long per number, gains
// nothing.)
struct Int8 {
  using Sums = __m512i;
  static constexpr int kRowsFromL2 = 8;
  static inline __attribute__((always_inline)) Sums add(Sums sums, __m512i row, __m512i columns) {
    return _mm512_dpbusd_epi32(sums, row, columns);
  }
  static inline __attribute__((always_inline)) __m512 value(const Product& p, Sums sums,
                                                            int64_t row, int64_t column,
                                                            __mmask16 held) {
    const __m512i excess =
        _mm512_slli_epi32(_mm512_maskz_loadu_epi32(held, p.column_sums + column), 7);
    const __m512 scale = _mm512_mul_ps(_mm512_maskz_loadu_ps(held, p.column_scales + column),
                                       _mm512_set1_ps(p.row_scales[row]));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums, excess)), scale);
  }
};

// Rows [row, row + R) by P panels from `panel` on; asks for `lines` cache lines from `ahead`
// on.
template <class Kind, int R, int P>
void block(const Product& p, int64_t row, int64_t panel, const char* ahead, int64_t lines) {
  constexpr int V = 2 * P;
  const int64_t groups = p.groups, panel_size = groups * kPanel * kGroupBytes;
  const char* weight = p.weight + panel * panel_size;
  const char* x = p.x + row * p.x_stride;
  typename Kind::Sums sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = typename Kind::Sums{};
  const auto add_group = [&](int64_t k) __attribute__((always_inline)) {
    __m512i columns[V];
    for (int v = 0; v < V; ++v)
      columns[v] = _mm512_loadu_si512(weight + (v / 2) * panel_size +
                                      (k * kPanel + (v % 2) * 16) * kGroupBytes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t group;
      std::memcpy(&group, x + r * p.x_stride + k * kGroupBytes, sizeof(group));
      const __m512i all = _mm512_set1_epi32(group);
      for (int v = 0; v < V; ++v) sums[r][v] = Kind::add(sums[r][v], all, columns[v]);
    }
  };
  constexpr int64_t kUnrolled = 4;
  const int64_t rounds = groups / kUnrolled;
  const int64_t lines_per_round = rounds > 0 ? (lines + rounds - 1) / rounds : 0;
  const char* const end = ahead + lines * kLine;
  for (int64_t i = 0; i < rounds; ++i) {
    for (int64_t j = 0; j < lines_per_round && ahead < end; ++j, ahead += kLine)
      if constexpr (R <= Kind::kRowsFromL2)
        _mm_prefetch(ahead, _MM_HINT_T1);
      else
        _mm_prefetch(ahead, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int64_t u = 0; u < kUnrolled; ++u) add_group(i * kUnrolled + u);
  }
  for (int64_t k = rounds * kUnrolled; k < groups; ++k) add_group(k);
  for (int v = 0; v < V; ++v) {
    const int64_t column = panel * kPanel + v * 16;
    if (column >= p.columns) break;
    const int64_t width = std::min<int64_t>(16, p.columns - column);
    const __mmask16 held = static_cast<__mmask16>((1u << width) - 1u);
    float offsets[16] = {};
    for (int64_t i = 0; p.bias != nullptr && i < width; ++i) {
      const uint32_t word = static_cast<uint32_t>(p.bias[column + i]) << 16;
      std::memcpy(offsets + i, &word, sizeof(word));
    }
    const __m512 bias = _mm512_loadu_ps(offsets);
    for (int r = 0; r < R; ++r)
      _mm256_mask_storeu_epi16(p.out + (row + r) * p.columns + column, held,
                               reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_add_ps(
                                   Kind::value(p, sums[r][v], row + r, column, held), bias))));
  }
}

using Block = void (*)(const Product&, int64_t, int64_t, const char*, int64_t);
// By rows; their sums, the columns and one broadcast fill the 32 registers.
template <class Kind>
constexpr Block kNarrow[] = {nullptr,
                             block<Kind, 1, 1>,
                             block<Kind, 2, 1>,
                             block<Kind, 3, 1>,
                             block<Kind, 4, 1>,
                             block<Kind, 5, 1>,
                             block<Kind, 6, 1>,
                             block<Kind, 7, 1>,
                             block<Kind, 8, 1>,
                             block<Kind, 9, 1>,
                             block<Kind, 10, 1>,
                             block<Kind, 11, 1>,
                             block<Kind, 12, 1>,
                             block<Kind, 13, 1>,
                             block<Kind, 14, 1>};
template <class Kind>
constexpr Block kWide[] = {nullptr,           block<Kind, 1, 2>, block<Kind, 2, 2>,
                           block<Kind, 3, 2>, block<Kind, 4, 2>, block<Kind, 5, 2>,
                           block<Kind, 6, 2>};
constexpr int64_t kNarrowRows = 14, kWideRows = 6;
// From here on arithmetic decides, and a wider block loads less for each product.
constexpr int64_t kManyRows = 96;
// Rows that stay in the cache while all panels pass.
constexpr int64_t kChunkRows = 512;

template <class Kind>
void multiply_panels(const Product& p, int64_t first, int64_t last, int64_t row_begin,
                     int64_t row_end) {
  const int64_t rows = row_end - row_begin;
  const bool wide = rows >= kManyRows;
  const int64_t most = wide ? kWideRows : kNarrowRows;
  const int64_t blocks = (rows + most - 1) / most;
  const int64_t panel_bytes = p.groups * kPanel * kGroupBytes;
  const char* const weight = p.weight;
  const char* const end = weight + last * panel_bytes;
  for (int64_t panel = first; panel < last;) {
    const int64_t panels = wide ? std::min<int64_t>(2, last - panel) : 1;
    const char* const here = weight + panel * panel_bytes;
    // One block streams: what is asked for is a little ahead. Several return to this panel, and
    // share in asking for the next.
    const char* next = blocks == 1 ? std::min(here + kAhead, end) : here + panels * panel_bytes;
    const int64_t lines = std::min(panels * panel_bytes, end - next) / kLine;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t row = rows * b / blocks, after = rows * (b + 1) / blocks;
      const int64_t line = lines * b / blocks;
      (panels == 2 ? kWide<Kind> : kNarrow<Kind>)[after - row](
          p, row_begin + row, panel, next + line* kLine, lines*(b + 1) / blocks - line);
    }
    panel += panels;
  }
}

// A block reads as many lines at once as it has rows. Where these lie a multiple of half a page
// apart, as with a depth that is a power of two, they share one or two sets of 8 ways, and every
// read misses the first cache.
constexpr int64_t kSharedSets = 2048;
constexpr int64_t kRowsThatShare = 4;

// The least distance of rows of `bytes` at which they start in different sets.
int64_t spread_stride(int64_t bytes) { return ((bytes + kLine - 1) / kLine | 1) * kLine; }

// Copies rows that share sets to where they do not; null where none need it.
std::unique_ptr<char[]> spread_rows(Product& p) {
  const bool shares = p.x_stride % kSharedSets == 0;
  if (!shares || p.rows <= kRowsThatShare || p.rows >= kManyRows) return nullptr;
  const int64_t bytes = p.groups * kGroupBytes, stride = spread_stride(bytes);
  std::unique_ptr<char[]> held(new char[p.rows * stride]);
  torch::stable::parallel_for(0, p.rows, 16, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      std::memcpy(held.get() + r * stride, p.x + r * p.x_stride, static_cast<size_t>(bytes));
  });
  p.x = held.get();
  p.x_stride = stride;
  return held;
}

template <class Kind>
void multiply(Product p) {
  const std::unique_ptr<char[]> held = spread_rows(p);
  const int64_t panels = (p.columns + kPanel - 1) / kPanel;
  for (int64_t row = 0; row < p.rows; row += kChunkRows) {
    const int64_t end = std::min(row + kChunkRows, p.rows);
    torch::stable::parallel_for(0, panels, 2, [&](int64_t first, int64_t last) {
      multiply_panels<Kind>(p, first, last, row, end);
    });
  }
}

static inline __attribute__((always_inline)) __m512 load_16(const uint16_t* row, int64_t k,
                                                            int64_t size) {
  const __mmask16 held = static_cast<__mmask16>((1u << std::min<int64_t>(16, size - k)) - 1u);
  const __m512i words = _mm512_maskz_cvtepu16_epi32(held, _mm256_maskz_loadu_epi16(held, row + k));
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(held, words, 16));
}

// A row in 127ths of its largest magnitude, which is returned divided by 127, with 128 added.
float round_row(const uint16_t* row, int64_t size, uint8_t* out, int64_t padded) {
  __m512 largest = _mm512_setzero_ps();
  for (int64_t k = 0; k < size; k += 16)
    largest = _mm512_max_ps(largest, _mm512_abs_ps(load_16(row, k, size)));
  const float scale = _mm512_reduce_max_ps(largest) / 127.0f;
  const __m512 inverse = _mm512_set1_ps(scale > 0.0f ? 1.0f / scale : 0.0f);
  std::memset(out, 128, static_cast<size_t>(padded));
  for (int64_t k = 0; k < size; k += 16) {
    const __mmask16 held = static_cast<__mmask16>((1u << std::min<int64_t>(16, size - k)) - 1u);
    __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(load_16(row, k, size), inverse));
    rounded = _mm512_max_epi32(_mm512_min_epi32(rounded, _mm512_set1_epi32(127)),
                               _mm512_set1_epi32(-127));
    _mm512_mask_cvtepi32_storeu_epi8(out + k, held,
                                     _mm512_add_epi32(rounded, _mm512_set1_epi32(128)));
  }
  return scale;
}
#pragma GCC pop_options
#pragma GCC diagnostic pop
#else
struct Bf16 {};
struct Int8 {};
template <class Kind>
void multiply(Product) {}
int64_t spread_stride(int64_t bytes) { return bytes; }
float round_row(const uint16_t*, int64_t, uint8_t*, int64_t) { return 0.0f; }
#endif

// Every CPU with AVX-512 BF16 has VNNI; a virtual machine may hide it.
bool packs_here() {
#if defined(__x86_64__)
  return isa_supported(kAvx512Bf16) && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

bool is_bf16(const Tensor& t) { return t.scalar_type() == ScalarType::BFloat16; }

bool is_rows_of(const Tensor& t, ScalarType dtype) {
  return t.dim() == 2 && t.scalar_type() == dtype && t.is_contiguous();
}

// The rows of a weight of `depth` bytes in panels; zeros beyond its columns and its depth.
void pack(const char* from, int64_t columns, int64_t depth, char* to) {
  const int64_t panels = (columns + kPanel - 1) / kPanel,
                groups = (depth + kGroupBytes - 1) / kGroupBytes;
  torch::stable::parallel_for(0, panels, 8, [&](int64_t first, int64_t last) {
    for (int64_t column = first * kPanel; column < last * kPanel; ++column) {
      char* at = to + ((column / kPanel) * groups * kPanel + column % kPanel) * kGroupBytes;
      for (int64_t k = 0; k < depth; k += kGroupBytes, at += kPanel * kGroupBytes) {
        std::memset(at, 0, kGroupBytes);
        if (column < columns)
          std::memcpy(at, from + column * depth + k,
                      static_cast<size_t>(std::min(kGroupBytes, depth - k)));
      }
    }
  });
}

Tensor pack_linear(const Tensor& weight) {
  STD_TORCH_CHECK(is_rows_of(weight, ScalarType::BFloat16) && weight.size(1) % 2 == 0,
                  "pack_linear: weight must be contiguous bfloat16 [N, K] with an even K");
  const int64_t columns = weight.size(0), depth = weight.size(1);
  const int64_t panels = (columns + kPanel - 1) / kPanel;
  Tensor packed = torch::stable::new_empty(weight, {panels, depth / 2, kPanel * 2});
  pack(static_cast<const char*>(weight.data_ptr()), columns, depth * 2,
       static_cast<char*>(packed.data_ptr()));
  return packed;
}

Tensor pack_int8(const Tensor& weight, Tensor& column_sums) {
  STD_TORCH_CHECK(is_rows_of(weight, ScalarType::Char),
                  "pack_int8: weight must be contiguous int8 [N, K]");
  const int64_t columns = weight.size(0), depth = weight.size(1);
  STD_TORCH_CHECK(column_sums.dim() == 1 && column_sums.is_contiguous() &&
                      column_sums.scalar_type() == ScalarType::Int &&
                      column_sums.size(0) == columns,
                  "pack_int8: column_sums must be contiguous int32 [N]");
  const int64_t panels = (columns + kPanel - 1) / kPanel,
                groups = (depth + kGroupBytes - 1) / kGroupBytes;
  Tensor packed = torch::stable::new_empty(weight, {panels, groups, kPanel * kGroupBytes});
  const int8_t* from = static_cast<const int8_t*>(weight.data_ptr());
  pack(reinterpret_cast<const char*>(from), columns, depth, static_cast<char*>(packed.data_ptr()));
  int32_t* sums = static_cast<int32_t*>(column_sums.data_ptr());
  for (int64_t column = 0; column < columns; ++column) {
    sums[column] = 0;
    for (int64_t k = 0; k < depth; ++k) sums[column] += from[column * depth + k];
  }
  return packed;
}

void check_packed(const Tensor& packed, ScalarType dtype, int64_t depth_of_group, int64_t columns,
                  int64_t depth) {
  STD_TORCH_CHECK(packed.dim() == 3 && packed.scalar_type() == dtype && packed.is_contiguous() &&
                      packed.size(0) == (columns + kPanel - 1) / kPanel &&
                      packed.size(1) == (depth + depth_of_group - 1) / depth_of_group &&
                      packed.size(2) == kPanel * depth_of_group,
                  "packed products: packed must be what was made of a weight [", columns, ", ",
                  depth, "]");
}

void check_bias(const std::optional<Tensor>& bias, int64_t columns) {
  STD_TORCH_CHECK(!bias.has_value() || (bias->dim() == 1 && is_bf16(*bias) &&
                                        bias->is_contiguous() && bias->size(0) == columns),
                  "packed products: bias must be contiguous bfloat16 [N]");
}

const uint16_t* data_of(const std::optional<Tensor>& bias) {
  return bias.has_value() ? static_cast<const uint16_t*>(bias->data_ptr()) : nullptr;
}

void packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
                   Tensor& out) {
  STD_TORCH_CHECK(packs_here(), "packed products need AVX-512 with bfloat16 and VNNI");
  STD_TORCH_CHECK(x.dim() == 2 && is_bf16(x) && x.stride(1) == 1 && x.size(1) % 2 == 0 &&
                      is_rows_of(out, ScalarType::BFloat16) && out.size(0) == x.size(0),
                  "packed_linear: x must be bfloat16 [M, K] with contiguous rows, out contiguous "
                  "bfloat16 [M, N]");
  check_packed(packed, ScalarType::BFloat16, 2, out.size(1), x.size(1));
  check_bias(bias, out.size(1));
  multiply<Bf16>({static_cast<const char*>(x.data_ptr()),
                  static_cast<const char*>(packed.data_ptr()), data_of(bias),
                  static_cast<uint16_t*>(out.data_ptr()), x.size(0), out.size(1), x.size(1) / 2,
                  x.stride(0) * 2});
}

void packed_int8_linear(const Tensor& x, const Tensor& packed, const Tensor& column_sums,
                        const Tensor& column_scales, const std::optional<Tensor>& bias,
                        Tensor& out) {
  STD_TORCH_CHECK(x.dim() == 2 && is_bf16(x) && x.stride(1) == 1 &&
                      is_rows_of(out, ScalarType::BFloat16) && out.size(0) == x.size(0),
                  "packed_int8_linear: x must be bfloat16 [M, K] with contiguous rows, out "
                  "contiguous bfloat16 [M, N]");
  const Int8Product product =
      int8_product(packed, column_sums, column_scales, bias, out.size(1), x.size(1));
  multiply_int8(product, static_cast<const uint16_t*>(x.data_ptr()), x.size(0), x.stride(0),
                static_cast<uint16_t*>(out.data_ptr()));
}

}  // namespace

Int8Product int8_product(const Tensor& packed, const Tensor& column_sums,
                         const Tensor& column_scales, const std::optional<Tensor>& bias,
                         int64_t columns, int64_t depth) {
  STD_TORCH_CHECK(packs_here(), "packed products need AVX-512 with bfloat16 and VNNI");
  check_packed(packed, ScalarType::Char, kGroupBytes, columns, depth);
  check_bias(bias, columns);
  const auto is_of_columns = [&](const Tensor& t, ScalarType dtype) {
    return t.dim() == 1 && t.is_contiguous() && t.scalar_type() == dtype && t.size(0) == columns;
  };
  STD_TORCH_CHECK(is_of_columns(column_sums, ScalarType::Int) &&
                      is_of_columns(column_scales, ScalarType::Float),
                  "packed int8 products: column_sums must be int32 and column_scales float32 [N]");
  return {static_cast<const char*>(packed.data_ptr()),
          static_cast<const int32_t*>(column_sums.data_ptr()),
          static_cast<const float*>(column_scales.data_ptr()),
          data_of(bias),
          columns,
          depth};
}

void multiply_int8(const Int8Product& product, const uint16_t* x, int64_t rows, int64_t x_stride,
                   uint16_t* out) {
  const int64_t groups = (product.depth + kGroupBytes - 1) / kGroupBytes,
                padded = groups * kGroupBytes, stride = spread_stride(padded);
  const std::unique_ptr<uint8_t[]> rounded(new uint8_t[static_cast<size_t>(rows * stride)]);
  const std::unique_ptr<float[]> row_scales(new float[static_cast<size_t>(rows)]);
  torch::stable::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      row_scales[r] =
          round_row(x + r * x_stride, product.depth, rounded.get() + r * stride, padded);
  });
  Product p{reinterpret_cast<const char*>(rounded.get()),
            product.weight,
            product.bias,
            out,
            rows,
            product.columns,
            groups,
            stride};
  p.row_scales = row_scales.get();
  p.column_scales = product.column_scales;
  p.column_sums = product.column_sums;
  multiply<Int8>(p);
}

STABLE_TORCH_LIBRARY_FRAGMENT(specplug, m) {
  m.def("pack_linear(Tensor weight) -> Tensor");
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, Tensor(a!) out) -> ()");
  m.def("pack_int8(Tensor weight, Tensor(a!) column_sums) -> Tensor");
  m.def(
      "packed_int8_linear(Tensor x, Tensor packed, Tensor column_sums, Tensor column_scales, "
      "Tensor? bias, Tensor(a!) out) -> ()");
  m.def("has_packed_products() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(specplug, CPU, m) {
  m.impl("pack_linear", TORCH_BOX(&pack_linear));
  m.impl("packed_linear", TORCH_BOX(&packed_linear));
  m.impl("pack_int8", TORCH_BOX(&pack_int8));
  m.impl("packed_int8_linear", TORCH_BOX(&packed_int8_linear));
}

STABLE_TORCH_LIBRARY_IMPL(specplug, CompositeExplicitAutograd, m) {
  m.impl("has_packed_products", TORCH_BOX(&packs_here));
}

}  // namespace specplug
