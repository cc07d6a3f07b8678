// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 rows with a weight packed for AVX-512 BF16, for the row counts of decoding.
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
#include <optional>

#include "isa.h"

namespace specplug {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// A panel holds the columns that two vectors of sums hold: [K / 2, 32, 2].
constexpr int64_t kPanel = 32;
// Bytes between what is read and what is asked for, while one block of rows streams panels.
constexpr int64_t kAhead = 16384;
constexpr int64_t kLine = 64;

struct Product {
  const uint16_t* x;       // [M, K], rows of `x_stride`
  const uint16_t* weight;  // [panels, K / 2, 32, 2]
  const uint16_t* bias;    // [N] or null
  uint16_t* out;           // [M, N]
  int64_t rows, columns, depth, x_stride;
};

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,bmi2,prefer-vector-width=512")

// Rows [row, row + R) by P panels from `panel` on; asks for `lines` cache lines from `ahead` on.
template <int R, int P>
void block(const Product& p, int64_t row, int64_t panel, const char* ahead, int64_t lines) {
  constexpr int V = 2 * P;
  const int64_t pairs = p.depth / 2, panel_size = pairs * kPanel * 2;
  const uint16_t* weight = p.weight + panel * panel_size;
  const uint16_t* x = p.x + row * p.x_stride;
  __m512 sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = _mm512_setzero_ps();
  const auto add_pair = [&](int64_t k) __attribute__((always_inline)) {
    __m512bh columns[V];
    for (int v = 0; v < V; ++v)
      columns[v] = reinterpret_cast<__m512bh>(
          _mm512_loadu_si512(weight + (v / 2) * panel_size + k * kPanel * 2 + (v % 2) * kPanel));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * p.x_stride + 2 * k, sizeof(pair));
      const __m512bh both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], both, columns[v]);
    }
  };
  constexpr int64_t kUnrolled = 4;
  const int64_t groups = pairs / kUnrolled;
  const int64_t lines_per_group = groups > 0 ? (lines + groups - 1) / groups : 0;
  const char* const end = ahead + lines * kLine;
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t i = 0; i < lines_per_group && ahead < end; ++i, ahead += kLine)
      _mm_prefetch(ahead, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int64_t u = 0; u < kUnrolled; ++u) add_pair(g * kUnrolled + u);
  }
  for (int64_t k = groups * kUnrolled; k < pairs; ++k) add_pair(k);
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
      _mm256_mask_storeu_epi16(
          p.out + (row + r) * p.columns + column, held,
          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_add_ps(sums[r][v], bias))));
  }
}

using Block = void (*)(const Product&, int64_t, int64_t, const char*, int64_t);
// By rows; their sums, the columns and one broadcast fill the 32 registers.
constexpr Block kNarrow[] = {nullptr,      block<1, 1>,  block<2, 1>,  block<3, 1>,  block<4, 1>,
                             block<5, 1>,  block<6, 1>,  block<7, 1>,  block<8, 1>,  block<9, 1>,
                             block<10, 1>, block<11, 1>, block<12, 1>, block<13, 1>, block<14, 1>};
constexpr Block kWide[] = {nullptr,     block<1, 2>, block<2, 2>, block<3, 2>,
                           block<4, 2>, block<5, 2>, block<6, 2>};
constexpr int64_t kNarrowRows = 14, kWideRows = 6;
// From here on arithmetic decides, and a wider block loads less for each product.
constexpr int64_t kManyRows = 96;
// Rows that stay in the cache while all panels pass.
constexpr int64_t kChunkRows = 512;

void multiply_panels(const Product& p, int64_t first, int64_t last, int64_t row_begin,
                     int64_t row_end) {
  const int64_t rows = row_end - row_begin;
  const bool wide = rows >= kManyRows;
  const int64_t most = wide ? kWideRows : kNarrowRows;
  const int64_t blocks = (rows + most - 1) / most;
  const int64_t panel_bytes = p.depth * kPanel * 2;
  const char* const weight = reinterpret_cast<const char*>(p.weight);
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
      (panels == 2 ? kWide : kNarrow)[after - row](p, row_begin + row, panel, next + line * kLine,
                                                   lines * (b + 1) / blocks - line);
    }
    panel += panels;
  }
}

void multiply(const Product& p) {
  const int64_t panels = (p.columns + kPanel - 1) / kPanel;
  for (int64_t row = 0; row < p.rows; row += kChunkRows) {
    const int64_t end = std::min(row + kChunkRows, p.rows);
    torch::stable::parallel_for(0, panels, 2, [&](int64_t first, int64_t last) {
      multiply_panels(p, first, last, row, end);
    });
  }
}
#pragma GCC pop_options
#else
void multiply(const Product&) {}
#endif

bool is_bf16(const Tensor& t) { return t.scalar_type() == ScalarType::BFloat16; }

Tensor pack_linear(const Tensor& weight) {
  STD_TORCH_CHECK(
      weight.dim() == 2 && is_bf16(weight) && weight.is_contiguous() && weight.size(1) % 2 == 0,
      "pack_linear: weight must be contiguous bfloat16 [N, K] with an even K");
  const int64_t columns = weight.size(0), depth = weight.size(1), pairs = depth / 2;
  const int64_t panels = (columns + kPanel - 1) / kPanel;
  Tensor packed = torch::stable::new_empty(weight, {panels, pairs, kPanel * 2});
  const uint16_t* from = static_cast<const uint16_t*>(weight.data_ptr());
  uint16_t* to = static_cast<uint16_t*>(packed.data_ptr());
  torch::stable::parallel_for(0, panels, 8, [&](int64_t first, int64_t last) {
    for (int64_t column = first * kPanel; column < last * kPanel; ++column) {
      uint16_t* at = to + (column / kPanel) * pairs * kPanel * 2 + (column % kPanel) * 2;
      for (int64_t k = 0; k < pairs; ++k, at += kPanel * 2) {
        if (column < columns)
          std::memcpy(at, from + column * depth + 2 * k, 4);
        else
          std::memset(at, 0, 4);
      }
    }
  });
  return packed;
}

void packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
                   Tensor& out) {
  STD_TORCH_CHECK(isa_supported(kAvx512Bf16), "packed_linear: needs AVX-512 with bfloat16");
  STD_TORCH_CHECK(x.dim() == 2 && is_bf16(x) && x.stride(1) == 1 && packed.dim() == 3 &&
                      is_bf16(packed) && packed.is_contiguous() &&
                      packed.size(1) * 2 == x.size(1) && packed.size(2) == kPanel * 2,
                  "packed_linear: x must be bfloat16 [M, K] with contiguous rows, packed what "
                  "pack_linear made of a weight [N, K]");
  const int64_t most = packed.size(0) * kPanel;
  STD_TORCH_CHECK(out.dim() == 2 && is_bf16(out) && out.is_contiguous() &&
                      out.size(0) == x.size(0) && out.size(1) <= most &&
                      out.size(1) > most - kPanel,
                  "packed_linear: out must be contiguous bfloat16 [M, N]");
  STD_TORCH_CHECK(!bias.has_value() || (bias->dim() == 1 && is_bf16(*bias) &&
                                        bias->is_contiguous() && bias->size(0) == out.size(1)),
                  "packed_linear: bias must be contiguous bfloat16 [N]");
  multiply(
      {static_cast<const uint16_t*>(x.data_ptr()), static_cast<const uint16_t*>(packed.data_ptr()),
       bias.has_value() ? static_cast<const uint16_t*>(bias->data_ptr()) : nullptr,
       static_cast<uint16_t*>(out.data_ptr()), x.size(0), out.size(1), x.size(1), x.stride(0)});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(specplug, m) {
  m.def("pack_linear(Tensor weight) -> Tensor");
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specplug, CPU, m) {
  m.impl("pack_linear", TORCH_BOX(&pack_linear));
  m.impl("packed_linear", TORCH_BOX(&packed_linear));
}

}  // namespace specplug
