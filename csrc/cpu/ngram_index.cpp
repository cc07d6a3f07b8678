// SPDX-License-Identifier: Apache-2.0
// Where each short suffix occurred in one request's tokens: hash tables and links over the tokens
// themselves. A table has one entry per distinct suffix and a link leads to the same suffix only,
// so no text makes a lookup follow more than kMaxOccurrences links; the hash is seeded per process,
// so no text is known to crowd a table either. Answers do not depend on the seed.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tensors.h"

namespace specplug {

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

bool is_index(const Tensor& tokens, const Tensor& links, const Tensor& heads) {
  return is_tensor(tokens, ScalarType::Int, {kAny}) &&
         is_tensor(links, ScalarType::Int, {kAny, kAny}) &&
         is_tensor(heads, ScalarType::Int, {links.size(0), kAny});
}

// N-gram nodes less probable than this are worth no row under any budget.
const double kLowestScore = std::log(1.0 / 256);

// A node that may be verified. `source` is its place in the tree that is grafted, -1 for one that
// only the text proposes.
struct Offer {
  double score;
  int32_t order;  // of entry; breaks ties, earlier first
  int32_t token, parent, depth, source;
};

bool comes_later(const Offer& a, const Offer& b) {
  return a.score < b.score || (a.score == b.score && a.order > b.order);
}

// What followed a suffix: distinct tokens, those seen more often first, then later ones.
struct Continuations {
  int64_t size = 0;  // of the suffix
  int32_t seen = 0;  // occurrences that were looked at
  int32_t count = 0;
  int32_t tokens[kMaxOccurrences];
  int32_t times[kMaxOccurrences];
};

// The text of one request with its index, see `ngram_lookup`.
struct IndexedText {
  const int32_t* tokens;
  const int32_t* links;
  const int32_t* heads;
  int64_t n, levels, capacity, buckets, longest, vocab_size;

  // What followed the last tokens of the text with `path` [length] behind it, after the longest
  // suffix that anything followed.
  Continuations after(const int32_t* path, int64_t length) const {
    Continuations found;
    std::vector<int32_t> tail(static_cast<size_t>(longest));
    for (int64_t level = 0; level < levels && !found.seen; ++level) {
      const int64_t size = longest - level;
      if (n + length < size) continue;
      for (int64_t i = 0; i < size; ++i) {
        const int64_t at = n + length - size + i;
        tail[static_cast<size_t>(i)] = at < n ? tokens[at] : path[at - n];
      }
      const size_t bytes = static_cast<size_t>(size) * sizeof(int32_t);
      const int32_t* head = heads + level * buckets;
      int64_t entry = first_entry(tail.data(), size, buckets - 1), place = 0;
      for (int64_t tried = 0; head[entry] != 0 && tried < buckets; ++tried) {
        if (head[entry] >= size && head[entry] <= n &&
            std::memcmp(tokens + head[entry] - size, tail.data(), bytes) == 0) {
          place = head[entry];
          break;
        }
        entry = (entry + 1) & (buckets - 1);
      }
      while (place >= size && found.seen < kMaxOccurrences) {
        // Nothing has followed the end of the text yet but the path.
        const bool is_known = place < n || length > 0;
        const int32_t next = !is_known ? 0 : place < n ? tokens[place] : path[0];
        if (is_known && next < vocab_size) {
          int32_t i = 0;
          while (i < found.count && found.tokens[i] != next) ++i;
          if (i == found.count) {
            found.tokens[found.count] = next;
            found.times[found.count++] = 0;
          }
          ++found.times[i];
          ++found.seen;
        }
        const int64_t earlier = links[level * capacity + place - 1];
        STD_TORCH_CHECK(earlier < place, "ngram_graft: the links are not those of these tokens");
        place = earlier;
        // Only tokens that changed after they were indexed can differ.
        if (place >= size && std::memcmp(tokens + place - size, tail.data(), bytes) != 0) break;
      }
      found.size = size;
    }
    // Few entries, and equal ones keep their order.
    for (int32_t i = 1; i < found.count; ++i)
      for (int32_t j = i; j > 0 && found.times[j - 1] < found.times[j]; --j) {
        std::swap(found.times[j - 1], found.times[j]);
        std::swap(found.tokens[j - 1], found.tokens[j]);
      }
    return found;
  }
};

int64_t ngram_lookup(const Tensor& tokens, Tensor& links, Tensor& heads, int64_t indexed,
                     int64_t longest, Tensor& sizes, Tensor& found) {
  STD_TORCH_CHECK(is_index(tokens, links, heads) &&
                      is_tensor(found, ScalarType::Int, {kAny, kAny}) &&
                      is_tensor(sizes, ScalarType::Int, {found.size(0)}),
                  "ngram_lookup: tokens [n], links and heads with a row per suffix length, sizes "
                  "[L] and found [L, n] must be contiguous int32");
  const int64_t n = tokens.size(0), levels = links.size(0), capacity = links.size(1);
  const int64_t buckets = heads.size(1), count = found.size(0), length = found.size(1);
  STD_TORCH_CHECK(levels >= 1 && levels <= longest,
                  "ngram_lookup: links and heads need one row per suffix length, from ", longest,
                  " down");
  STD_TORCH_CHECK(0 <= indexed && indexed <= n && n <= capacity, "ngram_lookup: ", n,
                  " tokens, of which ", indexed, " are indexed, do not fit ", capacity);
  STD_TORCH_CHECK((buckets & (buckets - 1)) == 0 && buckets >= 2 * capacity,
                  "ngram_lookup: the entries of heads must be a power of two and at least twice "
                  "those of links");
  const int32_t* token = data<int32_t>(tokens);
  int32_t* link = data<int32_t>(links);
  int32_t* head = data<int32_t>(heads);
  int32_t* size_out = data<int32_t>(sizes);
  int32_t* out = data<int32_t>(found);

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

int64_t ngram_graft(const Tensor& tokens, const Tensor& links, const Tensor& heads, int64_t longest,
                    const Tensor& shares, int64_t width, int64_t depth, int64_t vocab_size,
                    const Tensor& tree_tokens, const Tensor& tree_parents,
                    const Tensor& tree_scores, Tensor& out_tokens, Tensor& out_parents,
                    Tensor& out_depths, Tensor& out_scores) {
  STD_TORCH_CHECK(is_index(tokens, links, heads),
                  "ngram_graft: tokens [n], links and heads must be contiguous int32");
  const int64_t nodes = tree_parents.size(0), budget = out_parents.size(0);
  const IndexedText text = {data<int32_t>(tokens),
                            data<int32_t>(links),
                            data<int32_t>(heads),
                            tokens.size(0),
                            links.size(0),
                            links.size(1),
                            heads.size(1),
                            longest,
                            vocab_size};
  STD_TORCH_CHECK(text.levels >= 1 && text.levels <= longest && text.n <= text.capacity &&
                      text.buckets > 0 && (text.buckets & (text.buckets - 1)) == 0,
                  "ngram_graft: links and heads are not those of an index");
  STD_TORCH_CHECK(is_tensor(tree_tokens, ScalarType::Long, {nodes}) &&
                      is_tensor(tree_parents, ScalarType::Int, {nodes}) &&
                      is_tensor(tree_scores, ScalarType::Float, {nodes}),
                  "ngram_graft: a tree must be int64, int32 and float32 [M]");
  STD_TORCH_CHECK(is_tensor(out_tokens, ScalarType::Long, {budget}) &&
                      is_tensor(out_parents, ScalarType::Int, {budget}) &&
                      is_tensor(out_depths, ScalarType::Int, {budget}) &&
                      is_tensor(out_scores, ScalarType::Float, {budget}),
                  "ngram_graft: outputs must be int64, int32, int32 and float32 [N]");
  STD_TORCH_CHECK(is_tensor(shares, ScalarType::Float, {longest + 1}),
                  "ngram_graft: shares must be float32 [longest + 1]");
  const float* share = data<float>(shares);
  const int64_t* in_token = data<int64_t>(tree_tokens);
  const int32_t* in_parent = data<int32_t>(tree_parents);
  const float* in_score = data<float>(tree_scores);
  int64_t* token = data<int64_t>(out_tokens);
  int32_t* parent = data<int32_t>(out_parents);
  int32_t* node_depth = data<int32_t>(out_depths);
  float* score = data<float>(out_scores);

  // Children of each node of the tree, the root's last, in their order.
  std::vector<std::vector<int32_t>> children(static_cast<size_t>(nodes) + 1);
  for (int32_t i = 0; i < nodes; ++i) {
    const int32_t above = in_parent[i];
    const float highest = above < 0 ? 0.0f : above < i ? in_score[above] : -INFINITY;
    if (above < -1 || above >= i || !(in_score[i] <= highest)) return -1;
    children[static_cast<size_t>(above < 0 ? nodes : above)].push_back(i);
  }

  std::vector<Offer> heap;
  std::vector<int32_t> path;
  int32_t entered = 0, node = 0;
  const auto offer = [&](int64_t t, double total, int32_t above, int32_t level, int32_t source) {
    // What cannot be, by a certain text or a saturated head, is worth no row.
    if (!std::isfinite(total)) return;
    heap.push_back({total, entered++, static_cast<int32_t>(t), above, level, source});
    std::push_heap(heap.begin(), heap.end(), comes_later);
  };
  // Offers the children of output node `at`, -1 for the root, which is `source` in the tree.
  const auto expand = [&](int32_t at, int32_t source, double total) {
    path.clear();
    for (int32_t i = at; i >= 0; i = parent[i]) path.push_back(static_cast<int32_t>(token[i]));
    std::reverse(path.begin(), path.end());
    Continuations found;
    if (static_cast<int64_t>(path.size()) < depth)
      found = text.after(path.data(), static_cast<int64_t>(path.size()));
    const double weight = found.seen ? share[found.size] : 0.0;
    const int32_t level = static_cast<int32_t>(path.size()) + 1;
    const int32_t wanted = static_cast<int32_t>(std::min<int64_t>(width, found.count));
    bool used[kMaxOccurrences] = {};
    const bool in_tree = at < 0 || source >= 0;
    if (in_tree)
      for (const int32_t child : children[static_cast<size_t>(at < 0 ? nodes : source)]) {
        const double above = at < 0 ? 0.0 : static_cast<double>(in_score[source]);
        double p = (1.0 - weight) * std::exp(static_cast<double>(in_score[child]) - above);
        for (int32_t i = 0; i < wanted; ++i)
          if (found.tokens[i] == in_token[child] && !used[i]) {
            p += weight * found.times[i] / found.seen;
            used[i] = true;
          }
        offer(in_token[child], total + std::log(std::min(p, 1.0)), at, level, child);
      }
    for (int32_t i = 0; i < wanted; ++i) {
      const double below = total + std::log(std::min(weight * found.times[i] / found.seen, 1.0));
      if (!used[i] && below >= kLowestScore) offer(found.tokens[i], below, at, level, -1);
    }
  };
  if (budget > 0) expand(-1, -1, 0.0);
  while (!heap.empty() && node < budget) {
    std::pop_heap(heap.begin(), heap.end(), comes_later);
    const Offer best = heap.back();
    heap.pop_back();
    token[node] = best.token;
    parent[node] = best.parent;
    node_depth[node] = best.depth;
    score[node] = static_cast<float>(best.score);
    if (++node < budget) expand(node - 1, best.source, best.score);
  }
  return node;
}

}  // namespace

OPERATOR(CPU, ngram_lookup,
         "(Tensor tokens, Tensor(a!) links, Tensor(b!) heads, int indexed, int longest, Tensor(c!) "
         "sizes, Tensor(d!) found) -> int")
OPERATOR(CPU, ngram_graft,
         "(Tensor tokens, Tensor links, Tensor heads, int longest, Tensor shares, int width, int "
         "depth, int vocab_size, Tensor tree_tokens, Tensor tree_parents, Tensor tree_scores, "
         "Tensor(a!) out_tokens, Tensor(b!) out_parents, Tensor(c!) out_depths, Tensor(d!) "
         "out_scores) -> int")

}  // namespace specplug
