// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 rows with a packed weight, in bfloat16 (AVX-512, where the weight is
// compressed, or AVX2) or int8 (AVX-512 VNNI), for the row counts of decoding.
//
// A step of decoding reads every weight once, and its few rows should cost nothing beside that
// read: a panel of the weight streams through once while the sums of some rows stay in registers,
// and the memory behind it is asked for ahead. Every number is the sum over k, in order, in one
// register, so a row's result depends neither on the other rows nor on the number of threads.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "compressed_panels.h"
#include "element.h"
#include "int4_panels.h"
#include "isa.h"
#include "packed_blocks.h"
#include "packed_linear.h"
#include "pair_products.h"
#include "tensors.h"

namespace specplug {

#if !defined(__x86_64__)
// Never called: no instruction set of theirs is allowed there.
const PairProducts* pair_products_avx512() { return nullptr; }
const PairProducts* pair_products_avx512_bf16() { return nullptr; }
const Blocks* int8_blocks_avx512() { return nullptr; }
const Blocks* bf16_blocks_avx2() { return nullptr; }
float round_row(const uint16_t*, int64_t, uint8_t*, int64_t) { return 0.0f; }
#endif

namespace {

// Bytes between what is read and what is asked for, while one block of rows streams panels.
constexpr int64_t kAhead = 16384;
// Rows that a thread converts at least.
constexpr int64_t kFewestRows = 16;

int64_t panels_of(int64_t columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }

// All rows by the panels [first, last).
void multiply_panels(const Product& p, const Blocks& kind, bool wide, int64_t first, int64_t last) {
  const int64_t blocks = (p.rows + p.tile_rows - 1) / p.tile_rows;
  const int64_t panel_bytes = p.groups * kPanelColumns * kGroupBytes;
  const char* const end = p.weight + last * panel_bytes;
  for (int64_t panel = first; panel < last;) {
    const int64_t panels = wide ? std::min<int64_t>(2, last - panel) : 1;
    const char* const here = p.weight + panel * panel_bytes;
    // A panel that is read once streams: what is asked for is a little ahead. Whoever returns to it
    // asks for the next panel meanwhile.
    const bool streams = p.rows <= kind.streaming_rows;
    const char* next = streams ? std::min(here + kAhead, end) : here + panels * panel_bytes;
    const int64_t lines = std::min(panels * panel_bytes, end - next) / kLine;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t row = b * p.tile_rows, rows = std::min(p.tile_rows, p.rows - row);
      const int64_t line = lines * b / blocks;
      (panels == 2 ? kind.wide : kind.narrow)[rows](p, row, panel, next + line * kLine,
                                                    lines * (b + 1) / blocks - line);
    }
    panel += panels;
  }
}

// A block reads as many lines at once as it has rows. Where these lie a multiple of 512 bytes
// apart, as with a depth that is a power of two, they share eight sets of 8 ways or fewer, and
// reads miss the first cache.
constexpr int64_t kSharedSets = 512;
constexpr int64_t kRowsThatShare = 4;

// The least distance of rows of `bytes` at which they start in different sets.
int64_t spread_stride(int64_t bytes) { return ((bytes + kLine - 1) / kLine | 1) * kLine; }

// Copies rows of `bytes` that share sets, or are shorter than `padded`, to where they are not;
// null where none need it.
std::unique_ptr<char[]> spread_rows(const char*& x, int64_t& x_stride, int64_t rows, int64_t bytes,
                                    int64_t padded) {
  const bool shares = x_stride % kSharedSets == 0 && rows > kRowsThatShare;
  if (!shares && bytes == padded) return nullptr;
  const int64_t stride = spread_stride(padded);
  std::unique_ptr<char[]> held(new char[static_cast<size_t>(rows * stride)]);
  for_rows(rows, [&](int64_t r) {
    char* const to = held.get() + r * stride;
    std::memcpy(to, x + r * x_stride, static_cast<size_t>(bytes));
    std::memset(to + bytes, 0, static_cast<size_t>(padded - bytes));
  });
  x = held.get();
  x_stride = stride;
  return held;
}

// The rows of a tile: as equal as can be, and no more than `most`.
int64_t rows_of_tile(int64_t rows, int64_t most) {
  const int64_t tiles = (rows + most - 1) / most;
  return (rows + tiles - 1) / tiles;
}

// Rows of bfloat16 as float32 [tiles][padded depth][tile_rows], zeros behind `depth`: a block finds
// the numbers of its rows side by side. The last tile may end early.
std::unique_ptr<char[]> tiles_of_rows(const char* x, int64_t x_stride, int64_t rows, int64_t depth,
                                      int64_t padded, int64_t tile_rows) {
  const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
  std::unique_ptr<char[]> held(new char[static_cast<size_t>(tiles * tile_rows * padded) * 4]);
  torch::stable::parallel_for(
      0, tiles, (kFewestRows + tile_rows - 1) / tile_rows, [&](int64_t first, int64_t last) {
        for (int64_t row = first * tile_rows; row < std::min(last * tile_rows, rows); ++row) {
          const auto* const from = reinterpret_cast<const uint16_t*>(x + row * x_stride);
          auto* to = reinterpret_cast<uint32_t*>(held.get()) +
                     row / tile_rows * tile_rows * padded + row % tile_rows;
          for (int64_t k = 0; k < padded; ++k, to += tile_rows)
            *to = k < depth ? word_of(from[k]) : 0;
        }
      });
  return held;
}

void multiply_chunk(Product p, const Blocks& kind) {
  const bool wide = kind.wide != nullptr && p.rows >= kind.many_rows;
  p.tile_rows = rows_of_tile(p.rows, wide ? kind.wide_rows : kind.narrow_rows);
  std::unique_ptr<char[]> held;
  if (kind.takes_tiles) {
    held = tiles_of_rows(p.x, p.x_stride, p.rows, p.groups * 2, p.groups * 2, p.tile_rows);
    p.x = held.get();
  }
  torch::stable::parallel_for(0, panels_of(p.columns), 2, [&](int64_t first, int64_t last) {
    multiply_panels(p, kind, wide, first, last);
  });
}

void multiply(const Product& all, const Blocks& kind) {
  for (int64_t row = 0; row < all.rows; row += kind.chunk_rows) {
    Product p = all;
    p.x += row * all.x_stride;
    p.out += row * all.columns;
    p.rows = std::min(kind.chunk_rows, all.rows - row);
    if (all.row_scales != nullptr) p.row_scales += row;
    multiply_chunk(p, kind);
  }
}

// Gives a product its rows [rows, depth] of bfloat16 at p.x in the form that `kind` reads, with
// zeros up to `padded` numbers; returns what holds them.
template <class P>
std::unique_ptr<char[]> take_rows(P& p, const PairProducts& kind, int64_t most_rows, int64_t depth,
                                  int64_t padded) {
  p.tile_rows = rows_of_tile(p.rows, most_rows);
  if (!kind.takes_tiles) {
    std::unique_ptr<char[]> held = spread_rows(p.x, p.x_stride, p.rows, 2 * depth, 2 * padded);
    p.row_bytes = p.x_stride;
    return held;
  }
  std::unique_ptr<char[]> held = tiles_of_rows(p.x, p.x_stride, p.rows, depth, padded, p.tile_rows);
  p.x = held.get();
  p.x_stride = p.tile_rows * 4;
  p.row_bytes = padded * 4;
  return held;
}

// Rows that stay in the cache while all panels pass.
constexpr int64_t kChunkRows = 512;
// From so many rows on tiles have many.
constexpr int64_t kRowsOfMany = 64;

void multiply_compressed(const CompressedProduct& all, int64_t depth, const PairProducts& kind) {
  for (int64_t row = 0; row < all.rows; row += kChunkRows) {
    CompressedProduct p = all;
    p.x += row * all.x_stride;
    p.out += row * all.columns;
    p.rows = std::min(kChunkRows, all.rows - row);
    const int64_t most = p.rows >= kRowsOfMany ? kind.many_rows : kind.few_rows;
    const std::unique_ptr<char[]> held = take_rows(p, kind, most, depth, p.units * kUnitDepth);
    torch::stable::parallel_for(0, panels_of(p.columns), 2, [&](int64_t first, int64_t last) {
      kind.compressed(p, first, last);
    });
  }
}

// The instruction set of bfloat16 products here: kAvx512Bf16, kAvx512, kAvx2, or -1 for none.
int64_t packed_isa() {
  for (const int isa : {kAvx512Bf16, kAvx512, kAvx2})
    if (isa_allowed(isa)) return isa;
  return -1;
}

// Null without AVX-512.
const PairProducts* pair_products() {
  const int64_t isa = packed_isa();
  if (isa == kAvx512Bf16) return pair_products_avx512_bf16();
  return isa == kAvx512 ? pair_products_avx512() : nullptr;
}

bool has_int8_products() {
#if defined(__x86_64__)
  return isa_allowed(kAvx512) && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

void check_rows(const Tensor& x, const Tensor& out) {
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::BFloat16 && x.stride(1) == 1 &&
                      is_tensor(out, ScalarType::BFloat16, {x.size(0), kAny}),
                  "packed products: x must be bfloat16 [M, K] with contiguous rows, out contiguous "
                  "bfloat16 [M, N]");
}

// The rows of a weight of `depth` bytes in panels; zeros beyond its columns and its depth.
void pack(const char* from, int64_t columns, int64_t depth, char* to) {
  const int64_t panels = panels_of(columns), groups = (depth + kGroupBytes - 1) / kGroupBytes;
  torch::stable::parallel_for(0, panels, 8, [&](int64_t first, int64_t last) {
    for (int64_t column = first * kPanelColumns; column < last * kPanelColumns; ++column) {
      char* at = to + ((column / kPanelColumns) * groups * kPanelColumns + column % kPanelColumns) *
                          kGroupBytes;
      for (int64_t k = 0; k < depth; k += kGroupBytes, at += kPanelColumns * kGroupBytes) {
        std::memset(at, 0, kGroupBytes);
        if (column < columns)
          std::memcpy(at, from + column * depth + k,
                      static_cast<size_t>(std::min(kGroupBytes, depth - k)));
      }
    }
  });
}

// A compressed weight begins with its columns, its depth and where its pieces begin.
constexpr int64_t kShapeWords = 2;

struct Pieces {
  int64_t columns, depth;
  int64_t panels = panels_of(columns), units = (depth + kUnitDepth - 1) / kUnitDepth;
  int64_t of_panel = (units + kPieceUnits - 1) / kPieceUnits;

  int64_t count() const { return panels * of_panel; }
  int64_t header_bytes() const {
    return ((kShapeWords + count() + 1) * 8 + kLine - 1) / kLine * kLine;
  }
  // Calls `take(piece, panel, first unit, last unit)` for every piece.
  template <class Take>
  void for_each(const Take& take) const {
    torch::stable::parallel_for(0, panels, 8, [&](int64_t first, int64_t last) {
      for (int64_t i = first * of_panel; i < last * of_panel; ++i) {
        const int64_t unit = i % of_panel * kPieceUnits;
        take(i, i / of_panel, unit, std::min(unit + kPieceUnits, units));
      }
    });
  }
};

Tensor compress(const Tensor& weight) {
  const Pieces pieces{weight.size(0), weight.size(1)};
  const int64_t columns = pieces.columns, depth = pieces.depth, count = pieces.count();
  const uint16_t* from = data<uint16_t>(weight);
  const std::unique_ptr<int64_t[]> starts(new int64_t[static_cast<size_t>(count) + 1]);
  starts[0] = pieces.header_bytes();
  pieces.for_each([&](int64_t piece, int64_t panel, int64_t first, int64_t last) {
    starts[piece + 1] = compressed_bytes(from, columns, depth, panel, first, last);
  });
  for (int64_t piece = 0; piece < count; ++piece) starts[piece + 1] += starts[piece];
  Tensor packed = torch::stable::new_empty(weight, {starts[count]}, ScalarType::Byte);
  char* to = data<char>(packed);
  std::memset(to, 0, static_cast<size_t>(starts[0]));
  const int64_t shape[kShapeWords] = {columns, depth};
  std::memcpy(to, shape, sizeof(shape));
  std::memcpy(to + sizeof(shape), starts.get(), static_cast<size_t>(count + 1) * 8);
  pieces.for_each([&](int64_t piece, int64_t panel, int64_t first, int64_t last) {
    compress_units(from, columns, depth, panel, first, last, to + starts[piece]);
  });
  return packed;
}

Tensor pack_linear(const Tensor& weight) {
  STD_TORCH_CHECK(is_tensor(weight, ScalarType::BFloat16, {kAny, kAny}) && weight.size(1) % 2 == 0,
                  "pack_linear: weight must be contiguous bfloat16 [N, K] with an even K");
  if (pair_products() != nullptr) return compress(weight);
  const int64_t columns = weight.size(0), depth = weight.size(1);
  Tensor packed =
      torch::stable::new_empty(weight, {panels_of(columns), depth / 2, kPanelColumns * 2});
  pack(data<char>(weight), columns, depth * 2, data<char>(packed));
  return packed;
}

Tensor pack_int8(const Tensor& weight, Tensor& column_sums) {
  STD_TORCH_CHECK(is_tensor(weight, ScalarType::Char, {kAny, kAny}),
                  "pack_int8: weight must be contiguous int8 [N, K]");
  const int64_t columns = weight.size(0), depth = weight.size(1);
  STD_TORCH_CHECK(is_tensor(column_sums, ScalarType::Int, {columns}),
                  "pack_int8: column_sums must be contiguous int32 [N]");
  const int64_t groups = (depth + kGroupBytes - 1) / kGroupBytes;
  Tensor packed =
      torch::stable::new_empty(weight, {panels_of(columns), groups, kPanelColumns * kGroupBytes});
  const int8_t* from = data<int8_t>(weight);
  pack(reinterpret_cast<const char*>(from), columns, depth, data<char>(packed));
  int32_t* sums = data<int32_t>(column_sums);
  for (int64_t column = 0; column < columns; ++column) {
    sums[column] = 0;
    for (int64_t k = 0; k < depth; ++k) sums[column] += from[column * depth + k];
  }
  return packed;
}

void check_packed(const Tensor& packed, ScalarType dtype, int64_t depth_of_group, int64_t columns,
                  int64_t depth) {
  STD_TORCH_CHECK(is_tensor(packed, dtype,
                            {panels_of(columns), (depth + depth_of_group - 1) / depth_of_group,
                             kPanelColumns * depth_of_group}),
                  "packed products: packed must be what was made of a weight [", columns, ", ",
                  depth, "]");
}

void check_compressed(const Tensor& packed, const Pieces& pieces) {
  const auto* const words = data<int64_t>(packed);
  STD_TORCH_CHECK(is_tensor(packed, ScalarType::Byte, {kAny}) &&
                      packed.size(0) >= pieces.header_bytes() && words[0] == pieces.columns &&
                      words[1] == pieces.depth &&
                      words[kShapeWords + pieces.count()] == packed.size(0),
                  "packed products: packed must be what was made of a weight [", pieces.columns,
                  ", ", pieces.depth, "]");
}

void check_bias(const std::optional<Tensor>& bias, int64_t columns) {
  STD_TORCH_CHECK(!bias.has_value() || is_tensor(*bias, ScalarType::BFloat16, {columns}),
                  "packed products: bias must be contiguous bfloat16 [N]");
}

void packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
                   Tensor& out) {
  STD_TORCH_CHECK(packed_isa() >= 0, "packed products need AVX2");
  check_rows(x, out);
  const int64_t columns = out.size(1), depth = x.size(1);
  STD_TORCH_CHECK(depth % 2 == 0, "packed_linear: K must be even");
  check_bias(bias, columns);
  const char *const rows = data<char>(x), *const weight = data<char>(packed);
  uint16_t* const to = data<uint16_t>(out);
  if (const PairProducts* const kind = pair_products()) {
    const Pieces pieces{columns, depth};
    check_compressed(packed, pieces);
    CompressedProduct product{rows,
                              weight,
                              reinterpret_cast<const int64_t*>(weight) + kShapeWords,
                              data<uint16_t>(bias),
                              to,
                              x.size(0),
                              columns,
                              pieces.units};
    product.x_stride = x.stride(0) * 2;
    multiply_compressed(product, depth, *kind);
    return;
  }
  check_packed(packed, ScalarType::BFloat16, 2, columns, depth);
  multiply({rows, weight, data<uint16_t>(bias), to, x.size(0), columns, depth / 2, x.stride(0) * 2},
           *bf16_blocks_avx2());
}

void packed_int8_linear(const Tensor& x, const Tensor& packed, const Tensor& column_sums,
                        const Tensor& column_scales, const std::optional<Tensor>& bias,
                        Tensor& out) {
  check_rows(x, out);
  const Int8Product product =
      int8_product(packed, column_sums, column_scales, bias, out.size(1), x.size(1));
  multiply_int8(product, data<uint16_t>(x), x.size(0), x.stride(0), data<uint16_t>(out));
}

Int4Shape int4_shape(int64_t columns, int64_t depth, int64_t group_depth, bool has_zeros) {
  STD_TORCH_CHECK(group_depth > 0 && group_depth % kInt4UnitDepth == 0 && depth % group_depth == 0,
                  "packed 4-bit products: groups must have a multiple of ", kInt4UnitDepth,
                  " numbers and divide K; they have ", group_depth, ", K is ", depth);
  return {columns, depth, group_depth, has_zeros};
}

// One column of a panel: its scales, its zero points and its codes.
void pack_int4_column(const uint8_t* codes, const uint16_t* scales, const uint16_t* zeros,
                      const Int4Shape& shape, int64_t column, char* panel) {
  const int64_t half = column / 16, place = column % 16;
  for (int64_t group = 0; group < shape.groups(); ++group) {
    std::memcpy(panel + column * 2, scales + group, 2);
    panel += kLine;
    if (shape.has_zeros) {
      std::memcpy(panel + column * 2, zeros + group, 2);
      panel += kLine;
    }
    for (int64_t unit = 0; unit < shape.group_depth / kInt4UnitDepth; ++unit, panel += 2 * kLine) {
      uint16_t words[2] = {0, 0};
      for (int k = 0; k < kInt4UnitDepth; ++k, ++codes)
        words[k % 2] = static_cast<uint16_t>(words[k % 2] | (*codes & 15) << (k / 2 * 4));
      std::memcpy(panel + half * kLine + place * 4, words, sizeof(words));
    }
  }
}

Tensor pack_int4(const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros) {
  STD_TORCH_CHECK(is_tensor(codes, ScalarType::Byte, {kAny, kAny}) &&
                      is_tensor(scales, ScalarType::BFloat16, {codes.size(0), kAny}) &&
                      scales.size(1) > 0,
                  "pack_int4: codes must be contiguous uint8 [N, K], scales contiguous bfloat16 "
                  "[N, groups]");
  STD_TORCH_CHECK(!zeros.has_value() ||
                      is_tensor(*zeros, ScalarType::BFloat16, {scales.size(0), scales.size(1)}),
                  "pack_int4: zeros must be contiguous bfloat16 [N, groups]");
  const int64_t columns = codes.size(0), depth = codes.size(1);
  const Int4Shape shape = int4_shape(columns, depth, depth / scales.size(1), zeros.has_value());
  STD_TORCH_CHECK(shape.groups() == scales.size(1), "pack_int4: groups must divide K");
  const int64_t bytes = panels_of(columns) * shape.panel_bytes();
  Tensor packed = torch::stable::new_empty(codes, {bytes}, ScalarType::Byte);
  const auto* const from = data<uint8_t>(codes);
  const auto* const scale = data<uint16_t>(scales);
  const uint16_t* const zero = data<uint16_t>(zeros);
  char* const to = data<char>(packed);
  std::memset(to, 0, static_cast<size_t>(bytes));
  torch::stable::parallel_for(0, panels_of(columns), 8, [&](int64_t first, int64_t last) {
    for (int64_t c = first * kPanelColumns; c < std::min(columns, last * kPanelColumns); ++c)
      pack_int4_column(from + c * depth, scale + c * shape.groups(),
                       zero == nullptr ? nullptr : zero + c * shape.groups(), shape,
                       c % kPanelColumns, to + c / kPanelColumns * shape.panel_bytes());
  });
  return packed;
}

// The sums of the groups of a row.
void sum_groups(const char* row, int64_t groups, int64_t group_depth, float* sums) {
  for (int64_t group = 0; group < groups; ++group) {
    float of_places[kInt4UnitDepth] = {};
    for (int64_t k = 0; k < group_depth; k += kInt4UnitDepth, row += 2 * kInt4UnitDepth) {
      uint32_t words[kInt4UnitDepth];
      widen(Element::kBfloat16, row, kInt4UnitDepth, words);
      float numbers[kInt4UnitDepth];
      std::memcpy(numbers, words, sizeof(numbers));
      for (int place = 0; place < kInt4UnitDepth; ++place) of_places[place] += numbers[place];
    }
    sums[group] = 0.0f;
    for (const float sum : of_places) sums[group] += sum;
  }
}

void packed_int4_linear(const Tensor& x, const Tensor& packed, int64_t group_depth, bool has_zeros,
                        const std::optional<Tensor>& bias, Tensor& out) {
  const PairProducts* const kind = pair_products();
  STD_TORCH_CHECK(kind != nullptr, "packed 4-bit products need AVX-512");
  check_rows(x, out);
  const Int4Shape shape = int4_shape(out.size(1), x.size(1), group_depth, has_zeros);
  check_bias(bias, shape.columns);
  STD_TORCH_CHECK(
      is_tensor(packed, ScalarType::Byte, {panels_of(shape.columns) * shape.panel_bytes()}),
      "packed 4-bit products: packed must be what was made of a weight [", shape.columns, ", ",
      shape.depth, "]");
  if (x.size(0) == 0) return;
  const int64_t groups = shape.groups();
  const std::unique_ptr<float[]> sums(
      has_zeros ? new float[static_cast<size_t>(std::min(kChunkRows, x.size(0)) * groups)]
                : nullptr);
  for (int64_t row = 0; row < x.size(0); row += kChunkRows) {
    Int4Product p{shape,
                  data<char>(x) + row * x.stride(0) * 2,
                  data<char>(packed),
                  sums.get(),
                  data<uint16_t>(bias),
                  data<uint16_t>(out) + row * shape.columns,
                  std::min(kChunkRows, x.size(0) - row)};
    p.x_stride = x.stride(0) * 2;
    if (has_zeros)
      for_rows(p.rows, [&](int64_t r) {
        sum_groups(p.x + r * p.x_stride, groups, group_depth, sums.get() + r * groups);
      });
    const std::unique_ptr<char[]> held =
        take_rows(p, *kind, kind->int4_rows, shape.depth, shape.depth);
    torch::stable::parallel_for(0, panels_of(shape.columns), 2,
                                [&](int64_t first, int64_t last) { kind->int4(p, first, last); });
  }
}

}  // namespace

Int8Product int8_product(const Tensor& packed, const Tensor& column_sums,
                         const Tensor& column_scales, const std::optional<Tensor>& bias,
                         int64_t columns, int64_t depth) {
  STD_TORCH_CHECK(has_int8_products(), "packed int8 products need AVX-512 VNNI");
  check_packed(packed, ScalarType::Char, kGroupBytes, columns, depth);
  check_bias(bias, columns);
  STD_TORCH_CHECK(is_tensor(column_sums, ScalarType::Int, {columns}) &&
                      is_tensor(column_scales, ScalarType::Float, {columns}),
                  "packed int8 products: column_sums must be int32 and column_scales float32 [N]");
  return {data<char>(packed),
          data<int32_t>(column_sums),
          data<float>(column_scales),
          data<uint16_t>(bias),
          columns,
          depth};
}

void multiply_int8(const Int8Product& product, const uint16_t* x, int64_t rows, int64_t x_stride,
                   uint16_t* out) {
  const int64_t groups = (product.depth + kGroupBytes - 1) / kGroupBytes,
                padded = groups * kGroupBytes, stride = spread_stride(padded);
  const std::unique_ptr<uint8_t[]> rounded(new uint8_t[static_cast<size_t>(rows * stride)]);
  const std::unique_ptr<float[]> row_scales(new float[static_cast<size_t>(rows)]);
  for_rows(rows, [&](int64_t r) {
    row_scales[r] = round_row(x + r * x_stride, product.depth, rounded.get() + r * stride, padded);
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
  multiply(p, *int8_blocks_avx512());
}

OPERATOR(CPU, pack_linear, "(Tensor weight) -> Tensor")
OPERATOR(CPU, packed_linear, "(Tensor x, Tensor packed, Tensor? bias, Tensor(a!) out) -> ()")
OPERATOR(CPU, pack_int8, "(Tensor weight, Tensor(a!) column_sums) -> Tensor")
OPERATOR(CPU, packed_int8_linear,
         "(Tensor x, Tensor packed, Tensor column_sums, Tensor column_scales, Tensor? bias, "
         "Tensor(a!) out) -> ()")
OPERATOR(CPU, pack_int4, "(Tensor codes, Tensor scales, Tensor? zeros) -> Tensor")
OPERATOR(CPU, packed_int4_linear,
         "(Tensor x, Tensor packed, int group_depth, bool has_zeros, Tensor? bias, Tensor(a!) out) "
         "-> ()")
OPERATOR(CompositeExplicitAutograd, packed_isa, "() -> int")
OPERATOR(CompositeExplicitAutograd, has_int8_products, "() -> bool")

}  // namespace specplug
