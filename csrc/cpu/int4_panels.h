// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 rows with a weight of 4-bit codes that has a scale, and perhaps a zero
// point, for each column and group of depth.
//
// A panel of 32 columns is a stream of groups of depth. A group is a line with its 32 scales, a
// line with its 32 zero points if the weight has any, both bfloat16, and then 2 lines for every 8
// numbers of depth: the codes of the first 16 columns and those of the last 16. Word 2c + j of a
// line has the codes of column c at the depths j, 2 + j, 4 + j and 6 + j, from the lowest bit on.
#pragma once

#include <cstdint>

#include "packed_blocks.h"

namespace specplug {

constexpr int64_t kInt4UnitDepth = 8;
// Added to a code of the layout; codes are -8 to 7 in products, which bfloat16 holds exactly.
constexpr int kInt4Bias = 8;

struct Int4Shape {
  int64_t columns, depth, group_depth;
  bool has_zeros;

  int64_t groups() const { return depth / group_depth; }
  int64_t group_lines() const { return (has_zeros ? 2 : 1) + 2 * (group_depth / kInt4UnitDepth); }
  int64_t panel_bytes() const { return groups() * group_lines() * kLine; }
};

struct Int4Product {
  Int4Shape shape;
  const char* x;         // rows as `PairProducts` takes them
  const char* weight;    // [panels] of `panel_bytes`
  const float* sums;     // [rows, groups], sums of x, if there are zero points
  const uint16_t* bias;  // [columns] or null
  uint16_t* out;         // [rows, columns]
  int64_t rows;
  int64_t tile_rows = 0;
  int64_t row_bytes = 0;  // a tile begins at x + row * row_bytes
  int64_t x_stride = 0;   // bytes between rows, or between the depths of a tile
};

}  // namespace specplug
