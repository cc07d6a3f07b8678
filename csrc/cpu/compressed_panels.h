// SPDX-License-Identifier: Apache-2.0
// A bfloat16 weight in 12 bits a number, bit for bit.
//
// Numbers of a weight have few exponents: those of 128 rows by 32 columns hardly ever have more
// than 32 different signs with exponents. So the upper 9 bits become 5, the place in a table.
//
// A panel of 32 columns is a stream of blocks of depth, each a table, then units. A unit holds 4
// groups (8 numbers of depth) by 16 columns, the first 16 and the last 16 of the panel in turn. Its
// 4 vectors of 32 numbers take 3 lines: number i of vector v < 3 is in word i of line v, its place
// in the table in bits 0 to 4, its mantissa in bits 5 to 11. Number i of vector 3 is in bits 12
// to 15 of word i of all three, place and mantissa from the lowest bit on.
//
// A block with more signs and exponents than a table takes keeps its numbers, in 4 lines a unit.
//
// 6 blocks of a panel, or fewer at its end, are a piece.
#pragma once

#include <cstdint>

#include "packed_blocks.h"

namespace specplug {

constexpr int64_t kUnitGroups = 4;
constexpr int64_t kUnitDepth = 2 * kUnitGroups;
constexpr int64_t kBlockUnits = 16, kPieceUnits = 6 * kBlockUnits;
constexpr int64_t kTableSize = 32;  // of 2 bytes, one line
constexpr int64_t kUnitLines = 3, kPlainUnitLines = 4;
// Table entries have the mantissa's bits free. Set in the first one: the block is plain.
constexpr uint16_t kIsPlain = 1;

// Bytes of the units from `first` to `last` of `panel` of a weight [columns, depth].
int64_t compressed_bytes(const uint16_t* weight, int64_t columns, int64_t depth, int64_t panel,
                         int64_t first, int64_t last);

// Writes them, with zeros beyond the weight's columns and its depth.
void compress_units(const uint16_t* weight, int64_t columns, int64_t depth, int64_t panel,
                    int64_t first, int64_t last, char* to);

// Rows by a compressed weight.
struct CompressedProduct {
  const char* x;          // rows as `PairProducts` takes them
  const char* weight;     // from `starts` on
  const int64_t* starts;  // [panels, pieces], where they begin, and where the last one ends
  const uint16_t* bias;   // [columns] or null
  uint16_t* out;          // [rows, columns]
  int64_t rows, columns, units;
  int64_t tile_rows = 0;
  int64_t row_bytes = 0;  // a tile begins at x + row * row_bytes
  int64_t x_stride = 0;   // bytes between rows, or between the depths of a tile
};

}  // namespace specplug
