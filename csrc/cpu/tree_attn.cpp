// SPDX-License-Identifier: Apache-2.0
// Tree attention over a paged KV cache: splits the work, walks the blocks, merges the shares.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "tensors.h"
#include "tree_attn.h"

namespace specplug {

namespace {

// Rows (query rows x query heads of a KV head) that share one pass over the context.
constexpr int kMaxItemRows = 512;
// A unit is a stretch of groups for which the softmax begins anew; shares of units are merged in
// order. Threads take whole units, so a row's result is the same for any number of threads. A long
// context has longer ones from some slot on, as every unit of a split item keeps its share.
constexpr int kUnitGroups = 16;
constexpr int kLongUnitGroups = 128;
constexpr int kShortUnits = 16;
static_assert(kUnitGroups % kTileGroups == 0, "tiles lie in one unit");
// Below this much work (rows x groups, in units of 16 rows) waking other threads costs more.
constexpr int64_t kParallelCost = 24;
constexpr float kLog2E = 1.4426950408889634f;

// Everything about the call that does not change between items.
struct Problem {
  const AttnVariant* variant;
  Element element;        // of queries, outputs and dense tails
  Element cache_element;  // of the cache
  float value_scale;      // of the cache's values
  LayoutKind layout;
  bool direct;       // panels can be read from the cache without packing
  bool interleaved;  // words are made of the cache's rows on their way to the registers
  int head_size, block_size, num_kv_heads, group_size;
  int padded_words;  // words of a query row, a multiple of an AMX tile row
  float scale_log2;
  Heads query, key_cache, value_cache, output;
  const int32_t *req_index, *row_start, *row_count, *context_len, *mask_start;
  const int64_t* words;
  int64_t words_per_row;
  const int32_t* block_table;
  int64_t table_row;
  const int32_t *k_table, *v_table;
  Heads tail_key, tail_value;  // of a separate tail
  bool separate_tail;          // the context ends at context_len, because the tail is dense
  const int32_t* first_slot;   // [M] first context slot of a row, or null: rows attend from slot 0
  const int32_t* depth;        // [M] position of a row behind its root; null where nobody reads it
  const char* branches;        // [R] whether a row skips rows before it
  const int32_t* ancestor_start;  // [M] first of a row's `ancestors`, where a tree branches
  const int32_t* ancestors;       // tree rows that a row attends, in the order of their positions
  const float* alibi_slopes;      // [Hq] or null
  const float* sinks;             // [Hq] or null
  float scale, soft_cap;          // read where scores are reshaped before the softmax
  bool reshaped;                  // there is a soft cap, or ALiBi
  int bytes;                      // of an element
  int cache_bytes;                // of an element of the cache
};

// Rows [first_row, first_row + rows) of the packed (query row, query head) rows of one KV head.
struct Item {
  int req, head, first_row, rows;
  int context_groups, first_group, groups;
  int last_start;  // context slots from here on are seen by all rows
  int num_pieces, first_piece;
};

// Groups [begin, end) of one item, done by one thread.
struct Piece {
  int item, begin, end;
  int64_t partial;  // offset of its first unit's share in the workspace (floats); -1: whole item
};

struct Plan {
  std::vector<Item> items;
  std::vector<Piece> pieces;
  std::vector<int> thread_begin;  // first piece of each thread, plus the end
  std::unique_ptr<std::atomic<int>[]> pending;
  size_t pending_size = 0;
  Buffer<float> partials;
};

int ceil_div(int a, int b) { return (a + b - 1) / b; }

int64_t group_cost(const Item& item) { return (item.rows + 15) / 16 + 1; }

int unit_of(int group) {
  const int beyond = group - kShortUnits * kUnitGroups;
  return beyond < 0 ? group / kUnitGroups : kShortUnits + beyond / kLongUnitGroups;
}

int unit_begin(int unit) {
  const int beyond = unit - kShortUnits;
  return beyond < 0 ? unit * kUnitGroups : kShortUnits * kUnitGroups + beyond * kLongUnitGroups;
}

int units_of(const Piece& piece) { return unit_of(piece.end - 1) - unit_of(piece.begin) + 1; }

int64_t partial_floats(int rows, int head_size) {
  return (int64_t{ceil_div(rows, 16)} * 16 * (head_size + 2) + 15) / 16 * 16;
}

// Where a thread ends that has room for groups [begin, wanted): the nearest end of a unit.
int unit_end(int begin, int64_t wanted, int groups) {
  if (wanted >= groups) return groups;
  const int unit = unit_of(static_cast<int>(wanted));
  const int low = std::max(begin, unit_begin(unit));
  const int high = std::min(groups, unit_begin(unit + 1));
  return wanted - low < high - wanted ? low : high;
}

// Items of at most `max_rows` rows; returns their cost.
int64_t make_items(const Problem& p, int num_reqs, int max_rows, std::vector<Item>& items) {
  items.clear();
  int64_t total = 0;
  for (int r = 0; r < num_reqs; ++r) {
    const int rows = p.row_count[r] * p.group_size;
    const int context_groups =
        p.separate_tail ? ceil_div(p.context_len[r], kGroup) : p.context_len[r] / kGroup;
    const int groups = p.separate_tail ? context_groups + ceil_div(p.row_count[r], kGroup)
                                       : ceil_div(p.context_len[r] + p.row_count[r], kGroup);
    const int chunks = ceil_div(rows, max_rows);
    const int per_chunk = ceil_div(ceil_div(rows, chunks), kRowBlock) * kRowBlock;
    for (int h = 0; h < p.num_kv_heads; ++h)
      for (int first = 0; first < rows; first += per_chunk) {
        Item item = {r, h, first, std::min(per_chunk, rows - first), context_groups, 0, groups,
                     0, 0, 0};
        if (p.first_slot != nullptr) {
          const int32_t* starts = p.first_slot + p.mask_start[r];
          const auto [low, high] = std::minmax_element(
              starts + first / p.group_size, starts + ceil_div(first + item.rows, p.group_size));
          // Blocks below belong to nobody, or to another request.
          item.first_group = std::min(*low / kGroup, groups - 1);
          item.last_start = *high;
        }
        items.push_back(item);
        total += group_cost(item) * (groups - item.first_group);
      }
  }
  return total;
}

int64_t build_plan(const Problem& p, int num_reqs, int max_threads, Plan& plan) {
  plan.pieces.clear();
  plan.thread_begin.clear();
  int64_t total = make_items(p, num_reqs, kMaxItemRows, plan.items);
  const int64_t threads =
      std::max<int64_t>(1, std::min<int64_t>(max_threads, total / kParallelCost));
  int64_t units = 0;
  for (const Item& item : plan.items) units += units_of({0, item.first_group, item.groups, -1});
  // Short contexts have fewer units than threads: their rows are shared out instead.
  if (threads > 1 && units < 2 * threads) total = make_items(p, num_reqs, kRowBlock, plan.items);

  // Threads take equal consecutive stretches of all groups of all items.
  int64_t done = 0;
  int thread = 0;
  int64_t limit = total / threads;
  int64_t partial = 0;
  plan.thread_begin.push_back(0);
  for (int i = 0; i < static_cast<int>(plan.items.size()); ++i) {
    Item& item = plan.items[i];
    const int64_t cost = group_cost(item);
    item.first_piece = static_cast<int>(plan.pieces.size());
    int g = item.first_group;
    while (g < item.groups) {
      int end = item.groups;
      if (thread + 1 < threads) {
        const int64_t room = std::max<int64_t>(0, (limit - done + cost / 2) / cost);
        end = unit_end(g, g + room, item.groups);
        if (end <= g) {
          ++thread;
          plan.thread_begin.push_back(static_cast<int>(plan.pieces.size()));
          limit = total * (thread + 1) / threads;
          continue;
        }
      }
      plan.pieces.push_back({i, g, end, -1});
      done += cost * (end - g);
      g = end;
    }
    item.num_pieces = static_cast<int>(plan.pieces.size()) - item.first_piece;
    if (item.num_pieces > 1)
      for (int k = item.first_piece; k < item.first_piece + item.num_pieces; ++k) {
        Piece& piece = plan.pieces[k];
        piece.partial = partial;
        partial +=
            (k == item.first_piece ? 1 : units_of(piece)) * partial_floats(item.rows, p.head_size);
      }
  }
  while (static_cast<int64_t>(plan.thread_begin.size()) <= threads)
    plan.thread_begin.push_back(static_cast<int>(plan.pieces.size()));
  return partial;
}

// How many of the first `rows` rows of its tree a row attends.
int count_attended(const int64_t* words, int64_t rows) {
  int count = 0;
  for (int64_t w = 0; w * 64 < rows; ++w) {
    uint64_t bits = static_cast<uint64_t>(words[w]);
    if (rows - w * 64 < 64) bits &= (uint64_t{1} << (rows - w * 64)) - 1;
    count += __builtin_popcountll(bits);
  }
  return count;
}

// Keeps the last `left` rows that a row attends.
void keep_last(int64_t* words, int64_t words_per_row, int left) {
  for (int64_t w = words_per_row - 1; w >= 0; --w) {
    uint64_t bits = static_cast<uint64_t>(words[w]);
    int count = __builtin_popcountll(bits);
    for (; count > left; --count) bits &= bits - 1;
    left -= count;
    words[w] = static_cast<int64_t>(bits);
  }
}

// What follows from the positions of rows.
struct RowPositions {
  std::vector<int32_t> depth, first_slot, ancestors, ancestor_start;
  std::vector<int64_t> words;
  std::vector<char> branches;
};

// Counts the rows before each row that it attends; rows of a block also attend those after them.
void fill_depths(Problem& p, int num_reqs, int64_t num_rows, RowPositions& rows) {
  rows.depth.resize(static_cast<size_t>(num_rows));
  for (int r = 0; r < num_reqs; ++r)
    for (int i = 0; i < p.row_count[r]; ++i) {
      const int64_t row = p.mask_start[r] + i;
      const int64_t last = std::min<int64_t>(i + 1, p.words_per_row * 64);
      rows.depth[row] = count_attended(p.words + row * p.words_per_row, last) - 1;
    }
  p.depth = rows.depth.data();
}

// A row at depth d attends positions from context + d - window + 1 on: what that leaves of the
// context, and of the words where a tree is deeper than the window. Ancestors come in the order of
// their positions, and no window ends the rows after a row.
void apply_window(Problem& p, int num_reqs, int64_t num_rows, int window, RowPositions& rows) {
  rows.first_slot.assign(static_cast<size_t>(num_rows), 0);
  bool cuts_trees = false;
  for (int r = 0; r < num_reqs; ++r)
    for (int i = 0; i < p.row_count[r]; ++i) {
      const int64_t row = p.mask_start[r] + i;
      cuts_trees |= p.depth[row] >= window;
      const int64_t start = int64_t{p.context_len[r]} + p.depth[row] - window + 1;
      rows.first_slot[row] =
          static_cast<int32_t>(std::max<int64_t>(0, std::min<int64_t>(start, p.context_len[r])));
    }
  p.first_slot = rows.first_slot.data();
  if (!cuts_trees) return;
  rows.words.assign(p.words, p.words + num_rows * p.words_per_row);
  for (int r = 0; r < num_reqs; ++r)
    for (int64_t row = p.mask_start[r]; row < p.mask_start[r] + p.row_count[r]; ++row) {
      int64_t* words = rows.words.data() + row * p.words_per_row;
      const int after = count_attended(words, p.words_per_row * 64) - (p.depth[row] + 1);
      keep_last(words, p.words_per_row, window + after);
    }
  p.words = rows.words.data();
}

// Lists the rows that each row attends, of trees that branch.
void list_ancestors(Problem& p, int num_reqs, int64_t num_rows, RowPositions& rows) {
  rows.branches.assign(static_cast<size_t>(num_reqs), 0);
  rows.ancestor_start.resize(static_cast<size_t>(num_rows));
  rows.ancestors.clear();
  for (int r = 0; r < num_reqs; ++r) {
    // Each row of a chain attends all rows before it.
    bool is_chain = true;
    for (int i = 0; i < p.row_count[r]; ++i) is_chain &= p.depth[p.mask_start[r] + i] == i;
    if (is_chain) continue;
    rows.branches[r] = 1;
    for (int i = 0; i < p.row_count[r]; ++i) {
      const int64_t row = p.mask_start[r] + i;
      const int32_t first = static_cast<int32_t>(rows.ancestors.size());
      rows.ancestor_start[row] = first;
      for (int64_t w = 0; w < p.words_per_row; ++w)
        for (uint64_t bits = p.words[row * p.words_per_row + w]; bits != 0; bits &= bits - 1) {
          const int64_t at = w * 64 + __builtin_ctzll(bits);
          if (at < p.row_count[r]) rows.ancestors.push_back(static_cast<int32_t>(at));
        }
      rows.depth[row] = static_cast<int32_t>(rows.ancestors.size()) - first - 1;
    }
  }
  p.branches = rows.branches.data();
  p.ancestors = rows.ancestors.data();
  p.ancestor_start = rows.ancestor_start.data();
}

// 32 mask bits of one row starting at tail column j0 (negative: context, always attended).
uint32_t mask_bits(const int64_t* words, int64_t words_per_row, int j0) {
  if (j0 <= -kGroup) return 0xffffffffu;
  const auto word = [&](int64_t w) -> uint64_t {
    return w < words_per_row ? static_cast<uint64_t>(words[w]) : 0;
  };
  if (j0 < 0) {
    const int context = -j0;
    return static_cast<uint32_t>(word(0) << context) | ((1u << context) - 1u);
  }
  const int shift = j0 & 63;
  uint64_t bits = word(j0 >> 6) >> shift;
  if (shift > 32) bits |= word((j0 >> 6) + 1) << (64 - shift);
  return static_cast<uint32_t>(bits);
}

// The per-thread buffers of one worker.
struct Buffers {
  uint32_t *q, *p;
  float *s, *o, *m, *l;
  Partial later;  // of units after the first
  float* tail;    // scores of all rows, where a tree branches
  char* packed;
};

class Worker {
 public:
  Worker(const Problem& problem, Plan& plan) : p_(problem), plan_(plan) {}

  void run(int thread) {
    const int begin = plan_.thread_begin[thread];
    const int end = plan_.thread_begin[thread + 1];
    if (begin == end) return;
    p_.variant->begin();
    for (int i = begin; i < end; ++i)
      run_piece(plan_.pieces[i], i + 1 < end ? &plan_.pieces[i + 1] : nullptr);
    p_.variant->end();
  }

 private:
  static constexpr int64_t kPackedLd = kTileGroups * kGroup;

  int64_t packed_k_bytes() const { return int64_t{kGroup} * p_.padded_words * 4; }
  int64_t packed_v_bytes() const { return int64_t{kGroup} * p_.head_size * 4; }

  // `tail`: columns of the tail's scores.
  void reserve(int rows, int tail) {
    static thread_local Buffer<char> scratch;
    const int64_t padded = ceil_div(rows, kRowBlock) * kRowBlock;
    const auto up = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t q = up(padded * p_.padded_words * 4);
    const int64_t o = up(padded * p_.head_size * 4);
    const int64_t state = up(padded * 4);
    const int64_t s = up(kRowBlock * kPackedLd * 4);
    const int64_t tails = up(int64_t{rows} * tail * 4);
    const int64_t packed = kTileGroups * (packed_k_bytes() + packed_v_bytes());
    char* at = scratch.get(q + 2 * (o + 2 * state) + 2 * s + tails + packed);
    b_.q = reinterpret_cast<uint32_t*>(at);
    b_.o = reinterpret_cast<float*>(at += q);
    b_.m = reinterpret_cast<float*>(at += o);
    b_.l = reinterpret_cast<float*>(at += state);
    b_.later.o = reinterpret_cast<float*>(at += state);
    b_.later.m = reinterpret_cast<float*>(at += o);
    b_.later.l = reinterpret_cast<float*>(at += state);
    b_.s = reinterpret_cast<float*>(at += state);
    b_.p = reinterpret_cast<uint32_t*>(at += s);
    b_.tail = reinterpret_cast<float*>(at += s);
    b_.packed = at += tails;
  }

  void load_query(const Item& item) {
    const int words = p_.variant->bf16_dot ? p_.head_size / 2 : p_.head_size;
    int row = item.first_row / p_.group_size;
    int head = item.first_row % p_.group_size;
    for (int i = 0; i < item.rows; ++i) {
      const char* from =
          p_.query.at(p_.row_start[item.req] + row, item.head * p_.group_size + head, p_.bytes);
      if (++head == p_.group_size) {
        head = 0;
        ++row;
      }
      uint32_t* to = b_.q + static_cast<int64_t>(i) * p_.padded_words;
      if (p_.variant->bf16_dot)
        std::memcpy(to, from, static_cast<size_t>(words) * 4);
      else
        widen(p_.element, from, words, to);
      for (int d = words; d < p_.padded_words; ++d) to[d] = 0;
    }
    // Row tiles are computed whole; the rows past the end are never read back.
    const int padded = ceil_div(item.rows, 16) * 16;
    std::memset(b_.q + static_cast<int64_t>(item.rows) * p_.padded_words, 0,
                static_cast<size_t>(padded - item.rows) * p_.padded_words * 4);
  }

  // First slot that any row of the item's tree attends.
  int first_used(const Item& item) const {
    return p_.first_slot == nullptr ? 0 : p_.first_slot[p_.mask_start[item.req]];
  }

  const char* cache_at(const Heads& cache, const Item& item, int slot) const {
    const int64_t block =
        p_.block_table[p_.req_index[item.req] * p_.table_row + slot / p_.block_size];
    return cache.at(block, item.head, p_.cache_bytes);
  }

  void packed_group(int index, KvGroup& group) {
    char* k = b_.packed + index * (packed_k_bytes() + packed_v_bytes());
    group.k = k;
    group.k_panel = int64_t{kPanel} * p_.padded_words * 4;
    group.k_row = kPanel * 4;
    group.v = k + packed_k_bytes();
    if (p_.variant->bf16_dot) {
      group.v_panel = int64_t{kGroup} / 2 * kPanel * 4;
      group.v_row = kPanel * 4;
    } else {
      group.v_panel = kPanel * 4;
      group.v_row = int64_t{p_.head_size} * 4;
    }
  }

  // Slots [slot, slot + valid) of the cache, valid <= 32.
  void cache_group(const Item& item, int slot, int valid, int index, KvGroup& group) {
    if (p_.direct) {
      const char* k = cache_at(p_.key_cache, item, slot);
      const char* v = cache_at(p_.value_cache, item, slot);
      const int first = slot % p_.block_size;
      if (p_.layout == LayoutKind::kVnni) {
        // K: [tokens/16][dims/2][16 tokens][2 dims]; V: [dims/16][tokens/2][16 dims][2 tokens]
        group.k = k + static_cast<int64_t>(first) * p_.head_size * 2;
        group.k_panel = int64_t{kPanel} * p_.head_size * 2;
        group.k_row = kPanel * 4;
        group.v = v + static_cast<int64_t>(first) * kPanel * 2;
        group.v_panel = int64_t{kPanel} * p_.block_size * 2;
        group.v_row = kPanel * 4;
        if (valid < kGroup) copy_vnni_values(valid, index, group);
        return;
      }
      // K: [dims][tokens]; V: [tokens][dims]
      group.k = k + first * 4;
      group.k_panel = kPanel * 4;
      group.k_row = int64_t{p_.block_size} * 4;
      group.v = v + static_cast<int64_t>(first) * p_.head_size * 4;
      group.v_panel = kPanel * 4;
      group.v_row = int64_t{p_.head_size} * 4;
      if (valid < kGroup) copy_vec_values(valid, index, group);
      return;
    }
    if (p_.interleaved) {
      const int first = slot % p_.block_size;
      group.k = cache_at(p_.key_cache, item, slot) + first * 2;
      group.k_row = int64_t{p_.block_size} * 2;
      group.v =
          cache_at(p_.value_cache, item, slot) + static_cast<int64_t>(first) * p_.head_size * 2;
      group.v_row = int64_t{p_.head_size} * 2;
      group.valid = valid;
      return;
    }
    packed_group(index, group);
    const int below = first_used(item) - slot;  // slots that are behind the window
    for (int half = 0; half < 2; ++half) {
      const int left =
          below >= (half + 1) * kPanel ? 0 : std::max(0, std::min(kPanel, valid - half * kPanel));
      PackSource src = {};
      src.kind = p_.layout == LayoutKind::kVec ? PackSource::kVec : PackSource::kTable;
      // A half without valid slots is not read: it may lie past the end of the block table, or in
      // a block that left the window and is another request's.
      const int at = slot + half * kPanel;
      src.k = left > 0 ? cache_at(p_.key_cache, item, at) : p_.key_cache.base;
      src.v = left > 0 ? cache_at(p_.value_cache, item, at) : p_.value_cache.base;
      src.first = left > 0 ? at % p_.block_size : 0;
      src.valid = left;
      src.block_size = p_.block_size;
      src.k_table = p_.k_table;
      src.v_table = p_.v_table;
      p_.variant->pack(src, p_.cache_element, half, p_.head_size, p_.padded_words,
                       const_cast<char*>(group.k), const_cast<char*>(group.v));
    }
  }

  // Unused slots may hold NaN, and 0 x NaN is NaN: their V is read as zero.
  void copy_vnni_values(int valid, int index, KvGroup& group) {
    KvGroup packed;
    packed_group(index, packed);
    char* to = const_cast<char*>(packed.v);
    for (int panel = 0; panel < p_.head_size / kPanel; ++panel) {
      const char* from = group.v + panel * group.v_panel;
      uint32_t* out = reinterpret_cast<uint32_t*>(to + panel * packed.v_panel);
      const int pairs = valid / 2;
      std::memcpy(out, from, static_cast<size_t>(pairs) * 64);
      std::memset(out + pairs * kPanel, 0, static_cast<size_t>(kPanel - pairs) * 64);
      if (valid & 1) {
        const uint32_t* last = reinterpret_cast<const uint32_t*>(from) + pairs * kPanel;
        for (int d = 0; d < kPanel; ++d) out[pairs * kPanel + d] = last[d] & 0xffffu;
      }
    }
    group.v = packed.v;
    group.v_panel = packed.v_panel;
  }

  void copy_vec_values(int valid, int index, KvGroup& group) {
    KvGroup packed;
    packed_group(index, packed);
    char* to = const_cast<char*>(packed.v);
    const size_t used = static_cast<size_t>(valid) * p_.head_size * 4;
    std::memcpy(to, group.v, used);
    std::memset(to + used, 0, static_cast<size_t>(packed_v_bytes()) - used);
    group.v = packed.v;
  }

  void dense_group(const Item& item, int first, int valid, int index, KvGroup& group) {
    packed_group(index, group);
    for (int half = 0; half < 2; ++half) {
      const int left = std::max(0, std::min(kPanel, valid - half * kPanel));
      const int64_t row = p_.mask_start[item.req] + first + (left > 0 ? half * kPanel : 0);
      PackSource src = {};
      src.kind = PackSource::kDense;
      src.k = p_.tail_key.at(row, item.head, p_.bytes);
      src.v = p_.tail_value.at(row, item.head, p_.bytes);
      src.valid = left;
      src.k_stride = p_.tail_key.row;
      src.v_stride = p_.tail_value.row;
      p_.variant->pack(src, p_.element, half, p_.head_size, p_.padded_words,
                       const_cast<char*>(group.k), const_cast<char*>(group.v));
    }
  }

  // First tail column of a group; very negative when the mask does not touch it.
  static constexpr int kNoMask = -(1 << 30);

  int prepare_group(const Item& item, int g, int index, KvGroup& group) {
    const int context = p_.context_len[item.req];
    const int tail = p_.row_count[item.req];
    const int slot = g * kGroup;
    if (p_.separate_tail) {
      if (g >= item.context_groups) {
        const int first = (g - item.context_groups) * kGroup;
        dense_group(item, first, std::min(kGroup, tail - first), index, group);
        return first;
      }
      const int valid = std::min(kGroup, context - slot);
      cache_group(item, slot, valid, index, group);
      return valid == kGroup ? kNoMask : valid;  // a cut context group: see row_bits
    }
    cache_group(item, slot, std::min(kGroup, context + tail - slot), index, group);
    return slot + kGroup <= context ? kNoMask : slot - context;
  }

  // `following` is what this thread does next; null at its end.
  void run_piece(const Piece& piece, const Piece* following) {
    const Item& item = plan_.items[piece.item];
    const bool ordered = in_order_of_positions(item);
    const bool has_tail = ordered && piece.end > p_.context_len[item.req] / kGroup;
    tail_columns_ = has_tail ? tail_groups(item) * kGroup : 0;
    reserve(item.rows, tail_columns_);
    load_query(item);
    if (has_tail) score_tail(item);
    // The first piece of an item merges its units at once; others leave them to whoever merges all.
    const bool is_whole = piece.partial < 0;
    const bool merges = piece.begin == item.first_group;
    const Partial own = is_whole ? Partial{b_.m, b_.l, b_.o} : share(piece, 0);
    int unit = 0;
    for (int g = piece.begin; g < piece.end; ++unit) {
      const int end = std::min(piece.end, unit_begin(unit_of(g) + 1));
      const Partial to = unit == 0 ? own : merges ? b_.later : share(piece, unit);
      for (bool first = true; g < end; first = false) {
        // Tiles begin at multiples of their size, wherever a tree ends.
        const int n = std::min(end, (g / kTileGroups + 1) * kTileGroups) - g;
        find_next_keys(piece, g + n, following);
        if (ordered)
          run_ordered_tile(item, g, n, first, to);
        else
          run_tile(item, g, n, first, to);
        g += n;
      }
      if (merges && unit > 0) p_.variant->merge(own, to, item.rows, p_.head_size);
    }
    if (is_whole) return finish(item, own);
    // Whoever finishes an item last merges its shares, in their order.
    if (plan_.pending[piece.item].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const Partial all = share(plan_.pieces[item.first_piece], 0);
    for (int k = 1; k < item.num_pieces; ++k) {
      const Piece& part = plan_.pieces[item.first_piece + k];
      for (int i = 0; i < units_of(part); ++i)
        p_.variant->merge(all, share(part, i), item.rows, p_.head_size);
    }
    finish(item, all);
  }

  // Where unit `unit` of a piece that is not a whole item leaves its share.
  Partial share(const Piece& piece, int unit) const {
    const int rows = plan_.items[piece.item].rows;
    const int64_t padded = ceil_div(rows, 16) * 16;
    float* m = plan_.partials.data() + piece.partial + unit * partial_floats(rows, p_.head_size);
    return {m, m + padded, m + 2 * padded};
  }

  void finish(const Item& item, const Partial& whole) {
    if (p_.sinks != nullptr) {
      set_sinks(item, b_.later);
      p_.variant->merge(whole, b_.later, item.rows, p_.head_size);
    }
    RowTarget target;
    target.base = p_.output.at(p_.row_start[item.req], item.head * p_.group_size, p_.bytes);
    target.row_stride = p_.output.row;
    target.head_stride = p_.output.head;
    target.group_size = p_.group_size;
    target.element = p_.element;
    target.factor = p_.value_scale;
    p_.variant->write(whole.o, whole.l, item.rows, p_.head_size, target, item.first_row);
  }

  // Where the keys after those of groups [.., g) of `piece` are: its own, or those that the
  // following piece begins with.
  void find_next_keys(const Piece& piece, int g, const Piece* following) {
    num_next_ = 0;
    if (!p_.interleaved) return;
    const Piece* next = g < piece.end ? &piece : following;
    if (next == nullptr) return;
    const Item& item = plan_.items[next->item];
    for (int at = next == &piece ? g : next->begin; at < next->end && num_next_ < kTileGroups; ++at)
      cache_group(item, at * kGroup, kGroup, num_next_, next_[num_next_]), ++num_next_;
  }

  // Scores of rows from `row` on with some groups, in the form that the softmax takes.
  void score(const KvGroup* groups, int n, int row, int rows, float* s, int64_t ld,
             bool asks) const {
    const AttnVariant& v = *p_.variant;
    const uint32_t* q = b_.q + static_cast<int64_t>(row) * p_.padded_words;
    if (p_.interleaved)
      v.vec_scores(q, p_.padded_words, rows, p_.padded_words, groups, n, s, ld, asks);
    else
      v.scores(q, p_.padded_words, rows, p_.padded_words, groups, n, s, ld);
    if (p_.reshaped) v.reshape(s, ld, rows, n * kGroup, p_.scale, p_.soft_cap);
  }

  void run_tile(const Item& item, int g, int n, bool first, const Partial& to) {
    KvGroup groups[kTileGroups];
    int columns[kTileGroups];
    bool masked[kTileGroups];
    for (int i = 0; i < n; ++i) {
      columns[i] = prepare_group(item, g + i, i, groups[i]);
      masked[i] = columns[i] != kNoMask || (g + i) * kGroup < item.last_start;
    }
    const AttnVariant& v = *p_.variant;
    for (int r = 0; r < item.rows; r += kRowBlock) {
      const int rows = std::min(kRowBlock, item.rows - r);
      // Descendants come after their ancestors, so early rows attend nothing in late groups.
      uint32_t bits[kTileGroups][kRowBlock];
      int used = n;
      while (used > 0 && masked[used - 1] &&
             !row_bits(item, g + used - 1, columns[used - 1], r, rows, bits[used - 1]))
        --used;
      if (used == 0) {
        if (first) clear_state(rows, rows_from(to, r));
        continue;
      }
      score(groups, used, r, rows, b_.s, kPackedLd, r == 0);
      if (p_.alibi_slopes != nullptr)
        for (int i = 0; i < used; ++i) add_alibi(item, g + i, r, rows, b_.s + i * kGroup);
      for (int i = used - 1; i >= 0; --i) {
        if (!masked[i]) continue;
        if (i < used - 1) row_bits(item, g + i, columns[i], r, rows, bits[i]);
        v.mask(b_.s + i * kGroup, kPackedLd, rows, bits[i]);
      }
      const Partial at = rows_from(to, r);
      v.softmax(b_.s, kPackedLd, rows, used * kGroup, p_.scale_log2, first, at.m, at.l, at.o,
                p_.head_size, b_.p, kPackedLd);
      if (p_.interleaved)
        v.vec_values(b_.p, kPackedLd, rows, groups, used, p_.head_size, first, at.o, next_,
                     r == 0 ? num_next_ : 0);
      else
        v.values(b_.p, kPackedLd, rows, groups, used, p_.head_size, first, at.o);
    }
  }

  // ---- rows whose sums are in the order of positions --------------------------
  //
  // A node's ancestors lie in slots of their own, with other branches between them; once accepted
  // they lie in a line. So that a row is the same number by number in a tree and without one, the
  // scores of its ancestors are moved to the columns of their positions, and their values are taken
  // in that order. The context before the tree is still read once for all rows.

  bool in_order_of_positions(const Item& item) const {
    return p_.branches != nullptr && p_.branches[item.req] != 0;
  }

  // Groups from that of the root on.
  int tail_groups(const Item& item) const {
    return item.groups - p_.context_len[item.req] / kGroup;
  }

  // Scores of all rows, and where the values are, of slots from the root's group on.
  void score_tail(const Item& item) {
    KvGroup groups[kTileGroups];
    const int first = p_.context_len[item.req] / kGroup;
    for (int g = first; g < item.groups; g += kTileGroups) {
      const int n = std::min(kTileGroups, item.groups - g);
      for (int i = 0; i < n; ++i) cache_group(item, (g + i) * kGroup, kGroup, i, groups[i]);
      score(groups, n, 0, item.rows, b_.tail + (g - first) * kGroup, tail_columns_, false);
    }
    // From the pair of slots that the root is in.
    const int context = p_.context_len[item.req];
    tail_values_.clear();
    for (int slot = context / 2 * 2; slot < context + p_.row_count[item.req]; ++slot)
      tail_values_.push_back(cache_at(p_.value_cache, item, slot) +
                             int64_t{slot % p_.block_size} * p_.head_size * 2);
  }

  void run_ordered_tile(const Item& item, int g, int n, bool first, const Partial& to) {
    const AttnVariant& v = *p_.variant;
    const int context = p_.context_len[item.req];
    // Groups of the context alone, then of the last one the pairs of slots before the root's.
    const int whole = std::max(0, std::min(n, context / kGroup - g));
    const int pairs = whole < n && g + whole == context / kGroup ? context % kGroup / 2 : 0;
    KvGroup groups[kTileGroups];
    for (int i = 0; i < whole; ++i) cache_group(item, (g + i) * kGroup, kGroup, i, groups[i]);
    if (pairs > 0) cache_group(item, (g + whole) * kGroup, 2 * pairs, whole, groups[whole]);
    const int tile_end = (g + n) * kGroup;
    for (int r = 0; r < item.rows; r += kRowBlock) {
      const int rows = std::min(kRowBlock, item.rows - r);
      const Partial at = rows_from(to, r);
      int used = whole;
      if (whole < n)
        for_tree_rows(item, r, rows, [&](int64_t row, int, int) {
          used = std::max(used, std::min(n, ceil_div(row_end(item, row), kGroup) - g));
        });
      if (used == 0) {
        if (first) clear_state(rows, at);
        continue;
      }
      if (whole > 0) score(groups, whole, r, rows, b_.s, kPackedLd, r == 0);
      if (used > whole)
        for_tree_rows(item, r, rows, [&](int64_t row, int i, int heads) {
          for (int h = i; h < i + heads; ++h)
            move_scores(item, row, b_.tail + static_cast<int64_t>(r + h) * tail_columns_,
                        (g + whole) * kGroup, (g + used) * kGroup,
                        b_.s + h * kPackedLd + whole * kGroup);
        });
      if (p_.alibi_slopes != nullptr)
        for (int i = 0; i < used; ++i)
          add_slopes(item, (g + i) * kGroup, r, rows, b_.s + i * kGroup);
      v.softmax(b_.s, kPackedLd, rows, used * kGroup, p_.scale_log2, first, at.m, at.l, at.o,
                p_.head_size, b_.p, kPackedLd);
      const int shared = whole + (pairs > 0 && used > whole ? 1 : 0);
      if (shared > 0)
        v.vec_values(b_.p, kPackedLd, rows, groups, shared, p_.head_size, first, at.o, next_,
                     r == 0 ? num_next_ : 0);
      else if (first)
        std::memset(at.o, 0, static_cast<size_t>(rows) * p_.head_size * 4);
      if (used == whole) continue;
      const int begin = std::max(g * kGroup, context / 2 * 2);
      const int64_t column = (begin - g * kGroup) / (v.bf16_dot ? 2 : 1);
      for_tree_rows(item, r, rows, [&](int64_t row, int i, int heads) {
        const int end = std::min(tile_end, row_end(item, row));
        if (end <= begin) return;
        const char* values[kTileGroups * kGroup];
        for (int x = begin; x < end; ++x)
          values[x - begin] = tail_values_[slot_of(item, row, x) - context / 2 * 2];
        for (int h = i; h < i + heads; ++h)
          v.vec_row_values(b_.p + h * kPackedLd + column, values, end - begin, p_.head_size,
                           at.o + int64_t{h} * p_.head_size);
      });
    }
  }

  // Calls f(row of the masks, first packed row, number of packed rows) for the tree rows that
  // packed rows [r, r + rows) are heads of.
  template <class F>
  void for_tree_rows(const Item& item, int r, int rows, const F& f) const {
    int64_t row = p_.mask_start[item.req] + (item.first_row + r) / p_.group_size;
    int head = (item.first_row + r) % p_.group_size;
    for (int i = 0; i < rows; ++row, head = 0) {
      const int heads = std::min(p_.group_size - head, rows - i);
      f(row, i, heads);
      i += heads;
    }
  }

  // Position behind the last one that a row attends.
  int row_end(const Item& item, int64_t row) const {
    return p_.context_len[item.req] + p_.depth[row] + 1;
  }

  // Slot of a row's key and value at a position.
  int slot_of(const Item& item, int64_t row, int position) const {
    const int context = p_.context_len[item.req];
    if (position < context) return position;
    return context + p_.ancestors[p_.ancestor_start[row] + position - context];
  }

  // The scores `tail` of a row at positions [begin, end), none of them in a group of the context.
  void move_scores(const Item& item, int64_t row, const float* tail, int begin, int end,
                   float* s) const {
    const int first = p_.context_len[item.req] / kGroup * kGroup;
    const int seen = std::min(end, row_end(item, row));
    int x = begin;
    for (; x < seen; ++x) *s++ = tail[slot_of(item, row, x) - first];
    for (; x < end; ++x) *s++ = -std::numeric_limits<float>::infinity();
  }

  // Adds slope x (position of the key - position of the row); columns are positions from `first`
  // on.
  void add_slopes(const Item& item, int first, int block, int rows, float* s) const {
    for_tree_rows(item, block, rows, [&](int64_t row, int i, int heads) {
      const float own = static_cast<float>(row_end(item, row) - 1);
      for (int h = i; h < i + heads; ++h) {
        const int head = (item.first_row + block + h) % p_.group_size;
        const float slope = p_.alibi_slopes[item.head * p_.group_size + head];
        for (int j = 0; j < kGroup; ++j)
          s[h * kPackedLd + j] += slope * (static_cast<float>(first + j) - own);
      }
    });
  }

  // ---- masks and states --------------------------------------------------------

  Partial rows_from(const Partial& state, int row) const {
    return {state.m + row, state.l + row, state.o + static_cast<int64_t>(row) * p_.head_size};
  }

  // A share in which these rows attend nothing.
  void clear_state(int rows, const Partial& state) const {
    for (int i = 0; i < rows; ++i) {
      state.m[i] = kNoScore;
      state.l[i] = 0.0f;
    }
    std::memset(state.o, 0, static_cast<size_t>(rows) * p_.head_size * 4);
  }

  // Mask bits of a group for some packed rows; false when none is set.
  bool row_bits(const Item& item, int g, int column, int first, int rows, uint32_t* bits) const {
    const bool in_context = p_.separate_tail && g < item.context_groups;
    // Bits past the last row of the tree are ignored, whatever the words hold.
    const int left = column == kNoMask || in_context ? kGroup : p_.row_count[item.req] - column;
    const uint32_t exists = left >= kGroup ? 0xffffffffu : (1u << left) - 1u;
    uint32_t any = 0;
    for_tree_rows(item, first, rows, [&](int64_t row, int i, int heads) {
      uint32_t value = 0xffffffffu;
      if (in_context)
        value = column == kNoMask ? value : (1u << column) - 1u;
      else if (column != kNoMask)
        value = mask_bits(p_.words + row * p_.words_per_row, p_.words_per_row, column) & exists;
      if (p_.first_slot != nullptr) {
        const int behind = p_.first_slot[row] - g * kGroup;
        if (behind > 0) value &= behind >= kGroup ? 0u : ~((1u << behind) - 1u);
      }
      any |= value;
      std::fill_n(bits + i, heads, value);
    });
    return any != 0;
  }

  // The share of a sink: a score without a value.
  void set_sinks(const Item& item, const Partial& state) const {
    clear_state(item.rows, state);
    for (int i = 0; i < item.rows; ++i) {
      const int head = item.head * p_.group_size + (item.first_row + i) % p_.group_size;
      state.m[i] = std::max(p_.sinks[head] * kLog2E, kNoScore);
      state.l[i] = 1.0f;
    }
  }

  // Adds slope x (position of the key - position of the row) to the scores of one group.
  void add_alibi(const Item& item, int g, int first, int rows, float* s) const {
    const int context = p_.context_len[item.req];
    const int32_t* depth = p_.depth + p_.mask_start[item.req];
    const bool in_context = p_.separate_tail && g < item.context_groups;
    // Column of the tree, negative in the context.
    const int first_column = in_context         ? g * kGroup - context
                             : p_.separate_tail ? (g - item.context_groups) * kGroup
                                                : g * kGroup - context;
    float position[kGroup];
    for (int j = 0; j < kGroup; ++j) {
      const int column = first_column + j;
      if (column < 0)
        position[j] = static_cast<float>(context + column);
      else if (!in_context && column < p_.row_count[item.req])
        position[j] = static_cast<float>(context + depth[column]);
      else
        position[j] = 0.0f;
    }
    for (int i = 0; i < rows; ++i) {
      const int packed = item.first_row + first + i;
      const int row = packed / p_.group_size;
      const float slope = p_.alibi_slopes[item.head * p_.group_size + packed % p_.group_size];
      const float own = static_cast<float>(context + depth[row]);
      for (int j = 0; j < kGroup; ++j) s[i * kPackedLd + j] += slope * (position[j] - own);
    }
  }

  const Problem& p_;
  Plan& plan_;
  Buffers b_;
  KvGroup next_[kTileGroups];
  int num_next_ = 0;
  int tail_columns_ = 0;
  std::vector<const char*> tail_values_;
};

void check(const Tensor& t, const char* name, ScalarType dtype, int64_t dim) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == dtype && t.dim() == dim, "tree_attn: ", name,
                  " must be a CPU tensor of ", dim, " dimensions and the documented dtype; got ",
                  t.dim(), " dimensions");
}

void tree_attn(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
               Tensor& output, const Tensor& plan_rows, const Tensor& mask_words,
               const Tensor& block_table, double scale, int64_t layout, int64_t block_size,
               const std::optional<Tensor>& tables, const std::optional<Tensor>& tail_key,
               const std::optional<Tensor>& tail_value, int64_t window, double soft_cap,
               const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks,
               double value_scale) {
  const ScalarType dtype = query.scalar_type();
  const ScalarType cache_dtype = key_cache.scalar_type();
  const std::optional<Element> element = element_of(dtype);
  const std::optional<Element> cache_element = element_of(cache_dtype);
  STD_TORCH_CHECK(element.has_value() && size_of(*element) > 1,
                  "tree_attn: query must be float32, bfloat16 or float16");
  STD_TORCH_CHECK(
      cache_dtype == dtype || (cache_element.has_value() && size_of(*cache_element) == 1),
      "tree_attn: key_cache must be of the query's dtype, float8_e4m3fn or float8_e5m2");
  check(query, "query", dtype, 3);
  check(output, "output", dtype, 3);
  check(key_cache, "key_cache", cache_dtype, 4);
  check(value_cache, "value_cache", cache_dtype, 4);
  check(plan_rows, "plan", ScalarType::Int, 2);
  check(mask_words, "mask_words", ScalarType::Long, 2);
  check(block_table, "block_table", ScalarType::Int, 2);
  STD_TORCH_CHECK(layout >= 0 && layout <= 2, "tree_attn: unknown layout ", layout);
  STD_TORCH_CHECK(scale > 0, "tree_attn: scale must be positive, got ", scale);

  Problem p = {};
  p.element = *element;
  p.cache_element = *cache_element;
  p.bytes = size_of(p.element);
  p.cache_bytes = size_of(p.cache_element);
  p.value_scale = static_cast<float>(value_scale);
  p.variant = select_variant(p.cache_element == Element::kBfloat16);
  p.layout = static_cast<LayoutKind>(layout);
  p.head_size = static_cast<int>(query.size(2));
  p.block_size = static_cast<int>(block_size);
  p.num_kv_heads = static_cast<int>(key_cache.size(1));
  const int64_t num_heads = query.size(1);
  const int64_t interior = block_size * p.head_size;
  STD_TORCH_CHECK(p.head_size % kPanel == 0 && p.head_size > 0 && p.head_size <= kMaxHeadSize,
                  "tree_attn: head size ", p.head_size, " is not a multiple of ", kPanel, " up to ",
                  kMaxHeadSize);
  STD_TORCH_CHECK(block_size > 0 && block_size % kPanel == 0, "tree_attn: block size ", block_size,
                  " is not a multiple of ", kPanel);
  STD_TORCH_CHECK(num_heads % p.num_kv_heads == 0, "tree_attn: ", num_heads,
                  " query heads do not divide by ", p.num_kv_heads, " KV heads");
  STD_TORCH_CHECK(key_cache.size(2) * key_cache.size(3) == interior &&
                      value_cache.size(2) * value_cache.size(3) == interior &&
                      key_cache.size(0) == value_cache.size(0) &&
                      value_cache.size(1) == p.num_kv_heads,
                  "tree_attn: cache shapes do not match block size ", block_size, " and head size ",
                  p.head_size);
  STD_TORCH_CHECK(key_cache.stride(2) == key_cache.size(3) && key_cache.stride(3) == 1 &&
                      value_cache.stride(2) == value_cache.size(3) && value_cache.stride(3) == 1,
                  "tree_attn: the interior of a cache block must be contiguous");
  STD_TORCH_CHECK(query.stride(2) == 1 && output.stride(2) == 1 && output.size(1) == num_heads &&
                      output.size(2) == p.head_size,
                  "tree_attn: query and output must match and be contiguous in the head");
  STD_TORCH_CHECK(plan_rows.size(0) == 5 && plan_rows.is_contiguous() &&
                      mask_words.is_contiguous() && block_table.stride(1) == 1,
                  "tree_attn: plan [5, R], mask_words [M, W] must be contiguous");
  p.group_size = static_cast<int>(num_heads / p.num_kv_heads);
  const int words = p.variant->bf16_dot ? p.head_size / 2 : p.head_size;
  p.padded_words = p.variant->bf16_dot ? ceil_div(words, kPanel) * kPanel : words;
  p.direct =
      block_size % kGroup == 0 &&
      (p.variant->bf16_dot ? p.layout == LayoutKind::kVnni && p.head_size % kGroup == 0
                           : p.layout == LayoutKind::kVec && p.cache_element == Element::kFloat);
  STD_TORCH_CHECK(soft_cap >= 0 && window >= 0,
                  "tree_attn: soft_cap and window are positive, or 0 "
                  "for none; got ",
                  soft_cap, " and ", window);
  p.soft_cap = static_cast<float>(soft_cap);
  p.scale = static_cast<float>(scale);
  p.reshaped = soft_cap > 0 || alibi_slopes.has_value();
  p.scale_log2 = p.reshaped ? kLog2E : static_cast<float>(scale * 1.4426950408889634);
  const auto per_head = [&](const std::optional<Tensor>& t, const char* name) -> const float* {
    if (!t.has_value()) return nullptr;
    check(*t, name, ScalarType::Float, 1);
    STD_TORCH_CHECK(t->size(0) == num_heads && t->is_contiguous(), "tree_attn: ", name,
                    " must be [Hq]");
    return data<float>(t);
  };
  p.alibi_slopes = per_head(alibi_slopes, "alibi_slopes");
  p.sinks = per_head(sinks, "sinks");
  p.query = heads_of(query);
  p.key_cache = heads_of(key_cache);
  p.value_cache = heads_of(value_cache);
  p.output = heads_of(output);

  const int num_reqs = static_cast<int>(plan_rows.size(1));
  const int32_t* rows = data<int32_t>(plan_rows);
  p.req_index = rows;
  p.row_start = rows + num_reqs;
  p.row_count = rows + 2 * num_reqs;
  p.context_len = rows + 3 * num_reqs;
  p.mask_start = rows + 4 * num_reqs;
  p.words = data<int64_t>(mask_words);
  p.words_per_row = mask_words.size(1);
  p.block_table = data<int32_t>(block_table);
  p.table_row = block_table.stride(0);
  if (p.layout != LayoutKind::kVec && !p.direct) {
    STD_TORCH_CHECK(
        tables.has_value() && is_tensor(*tables, ScalarType::Int, {2, block_size, p.head_size}),
        "tree_attn: this layout needs the offset tables [2, block, head]");
    p.k_table = data<int32_t>(tables);
    p.v_table = p.k_table + interior;
  }
  STD_TORCH_CHECK(tail_key.has_value() == tail_value.has_value(),
                  "tree_attn: give both tail_key and tail_value or neither");
  int64_t tail_rows = 0;
  if (tail_key.has_value()) {
    check(*tail_key, "tail_key", dtype, 3);
    check(*tail_value, "tail_value", dtype, 3);
    STD_TORCH_CHECK(tail_key->size(1) == p.num_kv_heads && tail_key->size(2) == p.head_size &&
                        tail_value->size(0) == tail_key->size(0) &&
                        tail_value->size(1) == p.num_kv_heads &&
                        tail_value->size(2) == p.head_size && tail_key->stride(2) == 1 &&
                        tail_value->stride(2) == 1,
                    "tree_attn: tail_key and tail_value must be [M, Hkv, Dh]");
    p.tail_key = heads_of(*tail_key);
    p.tail_value = heads_of(*tail_value);
    tail_rows = tail_key->size(0);
  }
  p.separate_tail = tail_key.has_value();
  // Of slots behind a window nothing may be read; a dense tail has to be packed.
  p.interleaved = p.variant->vec_scores != nullptr && p.layout == LayoutKind::kVec &&
                  p.cache_element == Element::kBfloat16 && block_size % kGroup == 0 &&
                  p.head_size % kGroup == 0 && !p.separate_tail && window == 0;

  // Wrong metadata would read foreign memory: check all of it before any thread starts.
  for (int r = 0; r < num_reqs; ++r) {
    const int64_t slots = p.context_len[r] + (p.separate_tail ? 0 : int64_t{p.row_count[r]});
    STD_TORCH_CHECK(
        p.row_count[r] > 0 && p.context_len[r] >= 0 && p.row_start[r] >= 0 &&
            int64_t{p.row_start[r]} + p.row_count[r] <= query.size(0) &&
            int64_t{p.row_start[r]} + p.row_count[r] <= output.size(0) && p.mask_start[r] >= 0 &&
            int64_t{p.mask_start[r]} + p.row_count[r] <= mask_words.size(0) &&
            (!p.separate_tail || int64_t{p.mask_start[r]} + p.row_count[r] <= tail_rows) &&
            p.req_index[r] >= 0 && p.req_index[r] < block_table.size(0) &&
            slots <= block_table.size(1) * block_size,
        "tree_attn: tree ", r, " does not fit: rows ", p.row_start[r], "+", p.row_count[r],
        ", context ", p.context_len[r], ", block table row ", p.req_index[r]);
  }
  static thread_local RowPositions positions;
  if (window > 0 || p.alibi_slopes != nullptr || p.interleaved)
    fill_depths(p, num_reqs, mask_words.size(0), positions);
  if (p.interleaved) list_ancestors(p, num_reqs, mask_words.size(0), positions);
  if (window > 0)
    apply_window(p, num_reqs, mask_words.size(0),
                 static_cast<int>(std::min<int64_t>(window, std::numeric_limits<int>::max())),
                 positions);
  for (int r = 0; r < num_reqs; ++r) {
    const int64_t slots = p.context_len[r] + (p.separate_tail ? 0 : int64_t{p.row_count[r]});
    const int32_t* blocks = p.block_table + p.req_index[r] * p.table_row;
    // Entries of blocks that are behind the window are not followed.
    const int64_t first = p.first_slot == nullptr ? 0 : p.first_slot[p.mask_start[r]];
    for (int64_t i = first / block_size; i * block_size < slots; ++i)
      STD_TORCH_CHECK(blocks[i] >= 0 && blocks[i] < key_cache.size(0), "tree_attn: block ",
                      blocks[i], " of tree ", r, " is outside the cache of ", key_cache.size(0),
                      " blocks");
  }

  static thread_local Plan plan;
  const int64_t workspace =
      build_plan(p, num_reqs, static_cast<int>(torch::stable::get_num_threads()), plan);
  if (plan.items.empty()) return;
  if (workspace > 0) {
    plan.partials.get(workspace);
    if (plan.pending_size < plan.items.size()) {
      plan.pending_size = plan.items.size() * 2;
      plan.pending.reset(new std::atomic<int>[plan.pending_size]);
    }
    for (size_t i = 0; i < plan.items.size(); ++i)
      plan.pending[i].store(plan.items[i].num_pieces, std::memory_order_relaxed);
  }
  const int threads = static_cast<int>(plan.thread_begin.size()) - 1;
  Plan& shared = plan;
  if (threads == 1) {
    Worker(p, shared).run(0);
    return;
  }
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    Worker worker(p, shared);
    for (int64_t t = begin; t < end; ++t) worker.run(static_cast<int>(t));
  });
}

}  // namespace

OPERATOR(CPU, tree_attn,
         "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output, Tensor plan, "
         "Tensor mask_words, Tensor block_table, float scale, int layout, int block_size, Tensor? "
         "tables, Tensor? tail_key, Tensor? tail_value, int window=0, float soft_cap=0.0, Tensor? "
         "alibi_slopes=None, Tensor? sinks=None, float value_scale=1.0) -> ()")

}  // namespace specplug
