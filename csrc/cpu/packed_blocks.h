// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with the panels of a packed weight, one set for each instruction set.
#pragma once

// Headers come before a `#pragma GCC target`: other files share their inline functions.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "element.h"

namespace specplug {

// A panel holds 32 columns of a weight: [groups of 4 bytes of depth, 32, 4 bytes].
constexpr int64_t kPanelColumns = 32;
constexpr int64_t kGroupBytes = 4;
constexpr int64_t kLine = 64;

struct Product {
  const char* x;         // [M, groups] of 4 bytes, rows of `x_stride` bytes; or float32 in tiles
  const char* weight;    // [panels, groups, 32] of 4 bytes
  const uint16_t* bias;  // [N] or null
  uint16_t* out;         // [M, N]
  int64_t rows, columns, groups, x_stride;
  int64_t tile_rows = 0;  // rows of a block, but for the last
  // Of int8 products alone. Rows are stored with 128 added, as the instruction has it: a sum is
  // too large by 128 times the column's.
  const float* row_scales = nullptr;     // [M]
  const float* column_scales = nullptr;  // [N]
  const int32_t* column_sums = nullptr;  // [N]
};

// Some rows from `row` on by the panels from `panel` on; asks for `lines` cache lines from `ahead`
// on.
using Block = void (*)(const Product& p, int64_t row, int64_t panel, const char* ahead,
                       int64_t lines);

struct Blocks {
  const Block* narrow;  // [narrow_rows + 1], by rows; one panel
  int64_t narrow_rows;
  int64_t streaming_rows;  // as many rows read a panel once
  const Block* wide;       // [wide_rows + 1], by rows; two panels
  int64_t wide_rows;
  int64_t many_rows;   // from so many rows on in wide blocks, where there are any
  int64_t chunk_rows;  // rows that stay in the cache while all panels pass
  bool takes_tiles;    // rows come as float32 [tiles][2 * groups][tile_rows]
};

const Blocks* int8_blocks_avx512();  // rows of uint8; needs VNNI
const Blocks* bf16_blocks_avx2();

// A row of bfloat16 in 127ths of its largest magnitude, which is returned divided by 127, with 128
// added. Needs AVX-512.
float round_row(const uint16_t* row, int64_t size, uint8_t* out, int64_t padded);

}  // namespace specplug
