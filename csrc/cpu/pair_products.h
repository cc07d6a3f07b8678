// SPDX-License-Identifier: Apache-2.0
// Products that multiply pairs of numbers of depth, one set for each instruction set.
#pragma once

#include "compressed_panels.h"
#include "int4_panels.h"

namespace specplug {

// Rows of products come one after the other as bfloat16, or as float32
// [tiles][depth][tile_rows].
struct PairProducts {
  bool takes_tiles;
  int64_t few_rows, many_rows;  // of a tile of a compressed product with few and with many rows
  // The panels [first, last) of all rows.
  void (*compressed)(const CompressedProduct& product, int64_t first, int64_t last);
  int64_t int4_rows;  // of a tile
  void (*int4)(const Int4Product& product, int64_t first, int64_t last);
};

const PairProducts* pair_products_avx512();
const PairProducts* pair_products_avx512_bf16();

}  // namespace specplug
