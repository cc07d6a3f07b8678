// SPDX-License-Identifier: Apache-2.0
// Where each short suffix occurred in one request's tokens: hash tables and links over the tokens
// themselves. A table has one entry per distinct suffix and a link leads to the same suffix only,
// so no text makes a lookup follow more than kMaxOccurrences links; the hash is seeded per process,
// so no text is known to crowd a table either. Answers do not depend on the seed.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>

#include "ops.h"

namespace specplug {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// Occurrences of one suffix that are looked at, the latest ones.
constexpr int kMaxOccurrences = 4;

uint64_t make_seed() {
  try {
    std::random_device device;
    return static_cast<uint64_t>(device()) << 32 | device();
  } catch (const std::exception&) {
    // No entropy source: the clock and where the process was loaded.
    const auto now = std::chrono::high_resolution_clock::now().time_since_epoch().count();
    return static_cast<uint64_t>(now) ^ reinterpret_cast<uintptr_t>(&make_seed);
  }
}

// The finaliser of SplitMix64.
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// First entry to try for `size` tokens among `mask` + 1.
int64_t first_entry(const int32_t* tokens, int64_t size, int64_t mask) {
  static const uint64_t seed = make_seed();
  uint64_t hash = seed;
  for (int64_t i = 0; i < size; ++i) hash = mixed(hash ^ static_cast<uint32_t>(tokens[i]));
  return static_cast<int64_t>(hash & static_cast<uint64_t>(mask));
}

void check_int32(const Tensor& tensor, int64_t dim, const char* name) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Int && tensor.is_contiguous() && tensor.dim() == dim,
      "ngram_lookup: ", name, " must be a contiguous int32 tensor of ", dim, " dimensions");
}

}  // namespace

int64_t ngram_lookup(const Tensor& tokens, Tensor& links, Tensor& heads, int64_t indexed,
                     int64_t longest, Tensor& sizes, Tensor& found) {
  check_int32(tokens, 1, "tokens");
  check_int32(links, 2, "links");
  check_int32(heads, 2, "heads");
  check_int32(sizes, 1, "sizes");
  check_int32(found, 2, "found");
  const int64_t n = tokens.size(0), levels = links.size(0), capacity = links.size(1);
  const int64_t buckets = heads.size(1), count = found.size(0), length = found.size(1);
  STD_TORCH_CHECK(levels >= 1 && levels <= longest && heads.size(0) == levels,
                  "ngram_lookup: links and heads need one row per suffix length, from ", longest,
                  " down");
  STD_TORCH_CHECK(0 <= indexed && indexed <= n && n <= capacity, "ngram_lookup: ", n,
                  " tokens, of which ", indexed, " are indexed, do not fit ", capacity);
  STD_TORCH_CHECK((buckets & (buckets - 1)) == 0 && buckets >= 2 * capacity,
                  "ngram_lookup: the entries of heads must be a power of two and at least twice "
                  "those of links");
  STD_TORCH_CHECK(sizes.size(0) == count, "ngram_lookup: sizes and found disagree");
  const int32_t* token = static_cast<const int32_t*>(tokens.data_ptr());
  int32_t* link = static_cast<int32_t*>(links.data_ptr());
  int32_t* head = static_cast<int32_t*>(heads.data_ptr());
  int32_t* size_out = static_cast<int32_t*>(sizes.data_ptr());
  int32_t* out = static_cast<int32_t*>(found.data_ptr());

  // A place is the number of tokens up to the end of an occurrence; 0 ends the links and marks a
  // free entry. At most half of a table is ever taken.
  for (int64_t level = 0; level < levels; ++level) {
    const int64_t size = longest - level;
    const size_t bytes = static_cast<size_t>(size) * sizeof(int32_t);
    int32_t* own_link = link + level * capacity;
    int32_t* own_head = head + level * buckets;
    for (int64_t end = std::max(indexed + 1, size); end <= n; ++end) {
      const int32_t* suffix = token + end - size;
      int64_t entry = first_entry(suffix, size, buckets - 1);
      for (int64_t tried = 0; own_head[entry] != 0; ++tried) {
        const int64_t latest = own_head[entry];
        STD_TORCH_CHECK(size <= latest && latest < end && tried < buckets,
                        "ngram_lookup: the entries are not those of these tokens");
        if (std::memcmp(token + latest - size, suffix, bytes) == 0) break;
        entry = (entry + 1) & (buckets - 1);
      }
      own_link[end - 1] = own_head[entry];
      own_head[entry] = static_cast<int32_t>(end);
    }
  }

  int64_t rows = 0;
  for (int64_t level = 0; level < levels && rows < count && length > 0; ++level) {
    const int64_t size = longest - level;
    if (n < size) continue;
    const int32_t* own_link = link + level * capacity;
    const size_t bytes = static_cast<size_t>(size) * sizeof(int32_t);
    int64_t place = n;
    for (int steps = 0; steps < kMaxOccurrences && rows < count; ++steps) {
      const int64_t earlier = own_link[place - 1];
      STD_TORCH_CHECK(earlier < place, "ngram_lookup: the links are not those of these tokens");
      if (earlier < size) break;
      place = earlier;
      // Only tokens that changed after they were indexed can differ.
      if (std::memcmp(token + place - size, token + n - size, bytes) != 0) continue;
      // What is copied may itself be needed further on: the text repeats with period n - place.
      int32_t* row = out + rows * length;
      for (int64_t i = 0; i < length; ++i)
        row[i] = place + i < n ? token[place + i] : row[place + i - n];
      bool is_new = true;
      for (int64_t other = 0; other < rows && is_new; ++other)
        is_new = !std::equal(row, row + length, out + other * length);
      if (is_new) size_out[rows++] = static_cast<int32_t>(size);
    }
  }
  return rows;
}

}  // namespace specplug
