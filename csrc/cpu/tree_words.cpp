// SPDX-License-Identifier: Apache-2.0
// Ancestor masks as 64-bit words.
#include <cstring>

#include "tensors.h"

namespace specplug {

void ancestor_words(const Tensor& parents, const Tensor& row_counts, Tensor& words) {
  STD_TORCH_CHECK(is_tensor(parents, ScalarType::Int, {kAny}) &&
                      is_tensor(row_counts, ScalarType::Int, {kAny}) &&
                      is_tensor(words, ScalarType::Long, {kAny, kAny}),
                  "ancestor_words: parents and row_counts must be int32, words int64 [M, W]");
  const int32_t* parent = data<int32_t>(parents);
  const int32_t* counts = data<int32_t>(row_counts);
  uint64_t* out = data<uint64_t>(words);
  const int64_t num_trees = row_counts.numel();
  const int64_t width = words.size(1);
  int64_t rows = 0;
  for (int64_t r = 0; r < num_trees; ++r) {
    STD_TORCH_CHECK(counts[r] >= 1 && counts[r] <= width * 64, "ancestor_words: tree ", r, " has ",
                    counts[r], " rows, the words hold 1 to ", width * 64);
    rows += counts[r];
  }
  STD_TORCH_CHECK(rows == words.size(0) && rows - num_trees == parents.numel(),
                  "ancestor_words: ", parents.numel(), " parents and ", words.size(0),
                  " word rows do not match ", rows, " rows in ", num_trees, " trees");
  for (int64_t r = 0; r < num_trees; ++r) {
    std::memset(out, 0, static_cast<size_t>(width) * 8);
    out[0] = 1;
    for (int32_t j = 1; j < counts[r]; ++j) {
      const int32_t up = *parent++ + 1;  // row of the parent: -1 is the root, row 0
      STD_TORCH_CHECK(up >= 0 && up < j, "ancestor_words: node ", j - 1, " of tree ", r,
                      " has parent ", up - 1, "; a parent precedes its child and -1 is the root");
      uint64_t* row = out + j * width;
      std::memcpy(row, out + up * width, static_cast<size_t>(width) * 8);
      row[j / 64] |= uint64_t{1} << (j % 64);
    }
    out += counts[r] * width;
  }
}

OPERATOR(CPU, ancestor_words, "(Tensor parents, Tensor row_counts, Tensor(a!) words) -> ()")

}  // namespace specplug
