// SPDX-License-Identifier: Apache-2.0
// Trees over the product of a block head's marginals and a local head, for a batch of requests.
//
// Depth by depth: the local head reads the tokens of every request's frontier in one batch, scores
// the block head's candidates of the next depth branch by branch, and each request keeps its best
// nodes. The readable form is methods/local/tree.py with tree/beam.py.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "lanes.h"
#include "tensors.h"
#include "tree_attn.h"

namespace specplug {

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
// Multiply-adds of one product below which waking other threads costs more.
constexpr int64_t kParallelWork = 1 << 22;

int64_t padded_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// A matrix [N, K] packed by kernels/src/local_tree.py: groups of 32 rows, two panels of 16, each
// [words][16] of 32-bit words (bf16 pairs or floats), words a multiple of 16.
struct Packed {
  const char* data = nullptr;
  int64_t groups = 0;
  int words = 0;
  int64_t columns() const { return groups * kGroup; }
};

Packed packed_of(const std::optional<Tensor>& t) {
  Packed p;
  if (!t.has_value()) return p;
  STD_TORCH_CHECK(is_tensor(*t, ScalarType::Int, {kAny, 2, kAny, kPanel}) && t->size(2) % 16 == 0,
                  "local_trees: packed weights must be int32 [groups, 2, words, 16]");
  p.data = data<char>(t);
  p.groups = t->size(0);
  p.words = static_cast<int>(t->size(2));
  return p;
}

// out[rows, columns] = a[rows, words] x packed, both row-major; out in floats.
void multiply(const AttnVariant* v, const uint32_t* a, int64_t rows, const Packed& w, float* out) {
  if (rows == 0) return;
  const int64_t panel = static_cast<int64_t>(w.words) * kPanel * 4;
  std::vector<KvGroup> groups(w.groups);
  for (int64_t g = 0; g < w.groups; ++g)
    groups[g] = {w.data + 2 * g * panel, panel, kPanel * 4, nullptr, 0, 0};
  const int64_t ld = w.columns();
  const auto run = [&](int64_t begin, int64_t end) {
    v->begin();
    for (int64_t r = 0; r < rows; r += kRowBlock)
      v->scores(a + r * w.words, w.words, static_cast<int>(std::min<int64_t>(kRowBlock, rows - r)),
                w.words, groups.data() + begin, static_cast<int>(end - begin),
                out + r * ld + begin * kGroup, ld);
    v->end();
  };
  const int64_t work = padded_to(rows, 16) * ld * w.words;
  if (work < kParallelWork)
    run(0, w.groups);
  else
    torch::stable::parallel_for(0, w.groups, 8, run);
}

// ---- element-wise parts ----------------------------------------------------

template <class T>
ALWAYS_INLINE void gates(const T* x, const float* from_state, const float* h, int64_t size,
                         float* out) {
  for (int64_t i = 0; i < size; i += kLanes) {
    Lanes reset = load_lanes(x + i), update = load_lanes(x + size + i),
          fresh = load_lanes(x + 2 * size + i);
    Lanes state = {}, reset_h = {}, update_h = {}, fresh_h = {};
    if (from_state != nullptr) {
      reset_h = load_lanes(from_state + i);
      update_h = load_lanes(from_state + size + i);
      fresh_h = load_lanes(from_state + 2 * size + i);
      state = load_lanes(h + i);
    }
    reset = sigmoid_lanes(reset + reset_h);
    update = sigmoid_lanes(update + update_h);
    fresh = tanh_lanes(fresh + reset * fresh_h);
    store_lanes(out + i, fresh + update * (state - fresh));
  }
}

// One row of the three-gate cell: x [3 * size] input gates, from_state [3 * size] those of the
// state or null for a state of zeros. size is a multiple of 16.
CLONED void cell(const uint16_t* x, const float* from_state, const float* h, int64_t size,
                 float* out) {
  gates(x, from_state, h, size, out);
}
CLONED void cell(const Float16* x, const float* from_state, const float* h, int64_t size,
                 float* out) {
  gates(x, from_state, h, size, out);
}
CLONED void cell(const float* x, const float* from_state, const float* h, int64_t size,
                 float* out) {
  gates(x, from_state, h, size, out);
}

// One row of the RNN cell, which computes its new state and its rank vector from the same gates.
// x [3 * size] are the input gates of state, candidate and output, from_state those of the state or
// null for a state of zeros, terms [3 * size] those of the slot.
CLONED void rnn_gates(const float* x, const float* from_state, const float* h, const float* terms,
                      int64_t size, float* out, float* rank) {
  for (int64_t i = 0; i < size; i += kLanes) {
    Lanes part[3], state = {};
    for (int64_t g = 0; g < 3; ++g) {
      Lanes of_state = {};
      if (from_state != nullptr) of_state = load_lanes(from_state + g * size + i);
      part[g] = load_lanes(x + g * size + i) + (load_lanes(terms + g * size + i) + of_state);
    }
    if (h != nullptr) state = load_lanes(h + i);
    const Lanes update = sigmoid_lanes(part[0]), fresh = tanh_lanes(part[1]);
    store_lanes(out + i, fresh + update * (state - fresh));
    store_lanes(rank + i, tanh_lanes(part[2]));
  }
}

CLONED void add_rows(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store_lanes(x + i, load_lanes(x + i) + load_lanes(y + i));
}

CLONED void multiply_rows(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store_lanes(x + i, load_lanes(x + i) * load_lanes(y + i));
}

// x = x * sigmoid(gate + term) over n values, n a multiple of 16.
CLONED void apply_gate(float* x, const float* gate, const float* term, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Lanes open = sigmoid_lanes(load_lanes(gate + i) + load_lanes(term + i));
    store_lanes(x + i, load_lanes(x + i) * open);
  }
}

CLONED void activate(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Lanes v = load_lanes(x + i);
    store_lanes(x + i, v * sigmoid_lanes(v));
  }
}

CLONED void to_bf16(const float* x, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; i += kLanes) store_lanes(out + i, load_lanes(x + i));
}

// log sum exp of n values, n a multiple of 16 (padded with -inf).
CLONED float log_sum_exp(const float* x, int64_t n) {
  Lanes top = Lanes{} + kNone, sum = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Lanes v = load_lanes(x + i);
    top = v > top ? v : top;
  }
  const float peak = max_of(top);
  if (!(peak > kNone)) return kNone;
  for (int64_t i = 0; i < n; i += kLanes) sum += exp_lanes(load_lanes(x + i) - peak);
  return peak + std::log(sum_of(sum));
}

// out = base + weight * score over n values, n a multiple of 16.
CLONED void add_scaled(const float* base, const float* score, float weight, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kLanes)
    store_lanes(out + i, load_lanes(base + i) + weight * load_lanes(score + i));
}

// ---- the local head --------------------------------------------------------

// Rows of a table in the model's dtype, [rows, columns].
struct Table {
  const char* data = nullptr;
  int64_t rows = 0, columns = 0;
};

enum class Kind { kGru, kMarkov, kGated, kRnn };

struct LocalHead {
  const AttnVariant* variant;
  Element element;  // of the tables
  Kind kind;
  int64_t state_size;  // padded to 32; 0 without a state
  int64_t rank;        // padded to 32; state_size for an RNN
  bool silu;
  Table inputs;    // [V', 3S] input gates of a GRU, or [V', r] rows of a head without a state
  Table features;  // [n, I] inputs of a head with a state, where `inputs` is absent
  const int64_t* feature_rows = nullptr;  // [V'] row of `features` of each draft id
  Packed from_input, from_state;
  Packed to_rank;  // of the state, or of a row for the gates of a gated head
  Table output;    // [V', r]
};

// Nodes whose branch the local head has read: states and rank vectors, one row each.
struct Branches {
  Buffer<float> state;
  Buffer<float> rank;         // kept as floats only while it is made
  Buffer<uint32_t> state_op;  // operands of products, in the variant's words
  Buffer<uint32_t> rank_op;
  Buffer<float> from_state;  // [rows, 3S]
};

int words_of(const LocalHead& head, int64_t columns) {
  return static_cast<int>(head.variant->bf16_dot ? columns / 2 : columns);
}

void to_operand(const LocalHead& head, const float* x, int64_t n, uint32_t* out) {
  if (head.variant->bf16_dot)
    to_bf16(x, n, reinterpret_cast<uint16_t*>(out));
  else
    std::memcpy(out, x, static_cast<size_t>(n) * 4);
}

// A row of a table as an operand of columns padded to `columns`.
void table_operand(const LocalHead& head, const Table& table, int64_t row, int64_t columns,
                   uint32_t* out) {
  const int element = size_of(head.element);
  const char* in = table.data + row * table.columns * element;
  std::memset(out, 0, static_cast<size_t>(words_of(head, columns)) * 4);
  if (head.variant->bf16_dot)
    std::memcpy(out, in, static_cast<size_t>(table.columns) * element);
  else
    widen(head.element, in, table.columns, out);
}

// Packs output rows of `ids` [count] as columns of a product.
void pack_outputs(const LocalHead& head, const int64_t* ids, int64_t count, uint32_t* out) {
  const int words = words_of(head, head.rank);
  const int element = size_of(head.element);
  const int64_t row_words = head.output.columns * element / 4;
  std::memset(out, 0, static_cast<size_t>(padded_to(count, kGroup) * words) * 4);
  for (int64_t j = 0; j < count; ++j) {
    const char* row = head.output.data + ids[j] * head.output.columns * element;
    uint32_t* to = out + j / kPanel * kPanel * words + j % kPanel;
    if (head.variant->bf16_dot || head.element == Element::kFloat) {
      const uint32_t* from = reinterpret_cast<const uint32_t*>(row);
      for (int64_t w = 0; w < row_words; ++w) to[w * kPanel] = from[w];
    } else if (head.element == Element::kFloat16) {
      const Float16* from = reinterpret_cast<const Float16*>(row);
      for (int64_t w = 0; w < head.output.columns; ++w) to[w * kPanel] = word_of(from[w]);
    } else {
      const uint16_t* from = reinterpret_cast<const uint16_t*>(row);
      for (int64_t w = 0; w < head.output.columns; ++w) to[w * kPanel] = word_of(from[w]);
    }
  }
}

// One token for each of `count` nodes: parents[i] is its row in `from` (-1: a state of zeros).
// Input gates (or rows of a head without a state) come from `roots` where given, else by draft id.
// `terms` are those of each node's slot; empty if the head reads no slots.
void read_tokens(const LocalHead& head, Branches& from, const int64_t* tokens,
                 const int32_t* parents, int64_t count, const float* roots,
                 const std::vector<const float*>& terms, Branches& to, Buffer<float>& gate_buffer,
                 Buffer<uint32_t>& operands) {
  const int64_t s = head.state_size, r = head.rank;
  const int rank_words = words_of(head, r);
  uint32_t* rank_op = to.rank_op.get(count * rank_words);
  if (s == 0) {
    for (int64_t i = 0; i < count; ++i) {
      if (roots != nullptr)
        to_operand(head, roots + i * r, r, rank_op + i * rank_words);
      else
        table_operand(head, head.inputs, tokens[i], r, rank_op + i * rank_words);
    }
    if (terms.empty()) return;
    float* gate = nullptr;
    if (head.kind == Kind::kGated) {
      gate = gate_buffer.get(count * r);
      multiply(head.variant, rank_op, count, head.to_rank, gate);
    }
    float* rank = to.rank.get(r);
    uint32_t* words = operands.get(r);
    for (int64_t i = 0; i < count; ++i) {
      if (roots != nullptr) {
        std::copy_n(roots + i * r, r, rank);
      } else {
        const int64_t columns = head.inputs.columns;
        std::memset(words, 0, static_cast<size_t>(r) * 4);
        widen(head.element, head.inputs.data + tokens[i] * columns * size_of(head.element), columns,
              words);
        std::memcpy(rank, words, static_cast<size_t>(r) * 4);
      }
      if (gate == nullptr)
        multiply_rows(rank, terms[i], r);
      else
        apply_gate(rank, gate + i * r, terms[i], r);
      to_operand(head, rank, r, rank_op + i * rank_words);
    }
    return;
  }
  // Products of the states are shared by siblings, so they are made once a parent.
  std::vector<int32_t> slot(count, -1);
  std::vector<int32_t> needed;
  for (int64_t i = 0; i < count; ++i) {
    if (parents[i] < 0) continue;
    // Children of a parent come together or not; frontiers are short.
    const auto found = std::find(needed.begin(), needed.end(), parents[i]);
    slot[i] = static_cast<int32_t>(found - needed.begin());
    if (found == needed.end()) needed.push_back(parents[i]);
  }
  const int state_words = words_of(head, s);
  const int64_t num_needed = static_cast<int64_t>(needed.size());
  float* from_state = from.from_state.get(std::max<int64_t>(1, num_needed) * 3 * s);
  if (num_needed) {
    uint32_t* op = operands.get(num_needed * state_words);
    for (int64_t i = 0; i < num_needed; ++i)
      std::memcpy(op + i * state_words, from.state_op.data() + needed[i] * state_words,
                  static_cast<size_t>(state_words) * 4);
    multiply(head.variant, op, num_needed, head.from_state, from_state);
  }
  const float* computed = roots;
  if (roots == nullptr && head.inputs.data == nullptr) {
    const int64_t columns = head.from_input.words * (head.variant->bf16_dot ? 2 : 1);
    uint32_t* op = operands.get(count * head.from_input.words);
    for (int64_t i = 0; i < count; ++i)
      table_operand(head, head.features, head.feature_rows[tokens[i]], columns,
                    op + i * head.from_input.words);
    float* out = gate_buffer.get(count * head.from_input.columns());
    multiply(head.variant, op, count, head.from_input, out);
    computed = out;
  }
  float* state = to.state.get(count * s);
  float* rank = to.rank.get(count * r);
  uint32_t* state_op = to.state_op.get(count * state_words);
  for (int64_t i = 0; i < count; ++i) {
    const float* gates_h = slot[i] < 0 ? nullptr : from_state + slot[i] * 3 * s;
    const float* h = slot[i] < 0 ? nullptr : from.state.data() + parents[i] * s;
    if (head.kind == Kind::kRnn)
      rnn_gates(computed + i * 3 * s, gates_h, h, terms[i], s, state + i * s, rank + i * r);
    else if (computed != nullptr)
      cell(computed + i * 3 * s, gates_h, h, s, state + i * s);
    else
      with_number(head.element, [&](auto number) {
        const auto* const gates = reinterpret_cast<const decltype(number)*>(head.inputs.data);
        cell(gates + tokens[i] * 3 * s, gates_h, h, s, state + i * s);
      });
    to_operand(head, state + i * s, s, state_op + i * state_words);
  }
  if (head.kind == Kind::kGru) {
    multiply(head.variant, state_op, count, head.to_rank, rank);
    for (size_t i = 0; i < terms.size(); ++i) add_rows(rank + i * r, terms[i], r);
    if (head.silu) activate(rank, count * r);
  }
  for (int64_t i = 0; i < count; ++i) to_operand(head, rank + i * r, r, rank_op + i * rank_words);
}

// ---- the trees -------------------------------------------------------------

struct Node {
  double score;
  int32_t number;  // in the order seen; breaks ties, and parents come before children
  int32_t parent;  // number of the parent, -1 for the root
  int32_t depth;
  int32_t row;    // of the parent in the frontier it was expanded from
  int64_t token;  // draft id
};

bool comes_first(const Node& a, const Node& b) {
  return a.score > b.score || (a.score == b.score && a.number < b.number);
}

struct Tree {
  std::vector<Node> pool;
  // Nodes that score no more cannot stay: the last of a full pool, set once a depth.
  double floor = -std::numeric_limits<double>::infinity();
  int32_t seen = 0;
  int32_t budget, depth;
};

// Nodes that are expanded next: of one request after the other.
struct Frontier {
  std::vector<int32_t> request, number, parent_row;
  std::vector<int64_t> token;
  std::vector<double> score;
  void clear() {
    for (auto* v : {&request, &number, &parent_row}) v->clear();
    token.clear();
    score.clear();
  }
  int64_t size() const { return static_cast<int64_t>(request.size()); }
};

// Adds the `width` best children of one node, by fused [count]; `offset` makes them
// log-probabilities. Their sum of probabilities may exceed 1 by rounding, but no child scores more
// than its parent.
void add_children(Tree& tree, const Frontier& frontier, int64_t f, int32_t depth,
                  const int64_t* ids, const float* fused, int64_t count, float offset, size_t width,
                  std::vector<std::pair<float, int32_t>>& best) {
  best.clear();
  for (int64_t j = 0; j < count; ++j) {
    const float value = fused[j];
    if (!(value > kNone) || (best.size() == width && value <= best.back().first)) continue;
    if (best.size() == width) best.pop_back();
    auto at = best.end();
    while (at != best.begin() && (at - 1)->first < value) --at;
    best.insert(at, {value, static_cast<int32_t>(j)});
  }
  for (const auto& [value, j] : best) {
    const double score = frontier.score[f] + static_cast<double>(std::min(value + offset, 0.0f));
    // Also where it is NaN, as all scores are once a head's weights hold one.
    if (!(score > tree.floor)) break;
    tree.pool.push_back(
        {score, tree.seen++, frontier.number[f], depth, static_cast<int32_t>(f), ids[j]});
  }
}

Kind kind_of(const std::string& name) {
  if (name == "gru") return Kind::kGru;
  if (name == "markov") return Kind::kMarkov;
  if (name == "gated") return Kind::kGated;
  STD_TORCH_CHECK(name == "rnn", "local_trees: unknown kind ", name);
  return Kind::kRnn;
}

float log_sigmoid(float x) {
  return x < 0.0f ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x));
}

}  // namespace

void local_trees(const Tensor& ids, const Tensor& log_probs, const Tensor& budgets,
                 const Tensor& depths, int64_t width, const Tensor& alpha, const Tensor& beta,
                 const std::optional<Tensor>& log_prior, const Tensor& output_table,
                 const std::string& kind, int64_t state_size, int64_t rank, bool silu,
                 const std::optional<Tensor>& inputs, const std::optional<Tensor>& features,
                 const std::optional<Tensor>& feature_rows, const std::optional<Tensor>& w_input,
                 const std::optional<Tensor>& w_state, const std::optional<Tensor>& w_rank,
                 const std::optional<Tensor>& roots, const std::optional<Tensor>& slot_terms,
                 const std::optional<Tensor>& slot_confidence,
                 const std::optional<Tensor>& token_confidence, double confidence_weight,
                 Tensor& token_ids, Tensor& parents, Tensor& node_depths, Tensor& scores,
                 Tensor& counts) {
  const ScalarType dtype = output_table.scalar_type();
  const std::optional<Element> element = element_of(dtype);
  const auto is_floats = [](const Tensor& t, std::initializer_list<int64_t> sizes) {
    return is_tensor(t, ScalarType::Float, sizes);
  };
  const auto is_ints = [](const Tensor& t, std::initializer_list<int64_t> sizes) {
    return is_tensor(t, ScalarType::Int, sizes);
  };
  STD_TORCH_CHECK(is_tensor(ids, ScalarType::Long, {kAny, kAny, kAny}) &&
                      is_floats(log_probs, {ids.size(0), ids.size(1), ids.size(2)}),
                  "local_trees: candidates must be int64 and float32 [R, D, M]");
  const int64_t num_reqs = ids.size(0), num_depths = ids.size(1), num_candidates = ids.size(2);
  STD_TORCH_CHECK(is_ints(budgets, {num_reqs}) && is_ints(depths, {num_reqs}) &&
                      is_ints(counts, {num_reqs}) && width >= 1,
                  "local_trees: budgets, depths and counts must be int32 [R], the width positive");
  STD_TORCH_CHECK(is_floats(alpha, {kAny}) && is_floats(beta, {kAny}) &&
                      alpha.size(0) >= num_depths && beta.size(0) >= num_depths,
                  "local_trees: alpha and beta must be float32 [D]");
  STD_TORCH_CHECK(
      element.has_value() && size_of(*element) > 1 &&
          is_tensor(output_table, dtype, {kAny, kAny}) && output_table.size(1) % 2 == 0 &&
          rank % 32 == 0 && output_table.size(1) <= rank,
      "local_trees: the output table must be bfloat16, float16 or float32 [V', r], r even");
  const int64_t vocab = output_table.size(0), capacity = token_ids.size(1);

  LocalHead head;
  head.variant = select_variant(*element == Element::kBfloat16);
  head.element = *element;
  head.state_size = state_size;
  head.rank = rank;
  head.silu = silu;
  head.kind = kind_of(kind);
  const auto table_of = [](const Tensor& t) { return Table{data<char>(t), t.size(0), t.size(1)}; };
  head.output = table_of(output_table);
  head.from_input = packed_of(w_input);
  head.from_state = packed_of(w_state);
  head.to_rank = packed_of(w_rank);
  const int64_t input_columns = state_size ? 3 * state_size : rank;
  if (inputs.has_value()) {
    STD_TORCH_CHECK(is_tensor(*inputs, dtype, {vocab, kAny}) &&
                        (state_size ? inputs->size(1) == input_columns
                                    : inputs->size(1) <= rank && inputs->size(1) % 2 == 0),
                    "local_trees: input rows must be [V', ", input_columns, "]");
    head.inputs = table_of(*inputs);
  }
  const auto fits = [&](const Packed& w, int64_t columns, int64_t rows) {
    return w.data != nullptr && w.columns() == columns && w.words == words_of(head, rows);
  };
  const bool gated = head.kind == Kind::kGated, rnn = head.kind == Kind::kRnn;
  STD_TORCH_CHECK((rnn || head.kind == Kind::kGru) == (state_size > 0) &&
                      (!rnn || (rank == state_size && !inputs.has_value())) &&
                      (!(rnn || gated) || slot_terms.has_value()),
                  "local_trees: a head of kind ", kind, " does not fit a state of ", state_size,
                  ", a rank of ", rank, " and its tensors");
  STD_TORCH_CHECK((!state_size ||
                   (state_size % 32 == 0 && fits(head.from_state, 3 * state_size, state_size))) &&
                      (rnn || head.kind == Kind::kMarkov ||
                       fits(head.to_rank, rank, gated ? rank : state_size)),
                  "local_trees: packed weights do not fit a state of ", state_size,
                  " and a rank of ", rank, " for variant ", head.variant->name);
  if (state_size) {
    if (!inputs.has_value()) {
      STD_TORCH_CHECK(features.has_value() && feature_rows.has_value() &&
                          is_tensor(*features, dtype, {kAny, kAny}) && features->size(1) % 2 == 0 &&
                          is_tensor(*feature_rows, ScalarType::Long, {vocab}) &&
                          head.from_input.columns() == 3 * state_size &&
                          head.from_input.words >= words_of(head, features->size(1)),
                      "local_trees: without input gates, features [n, I], their rows [V'] and "
                      "packed input weights are needed");
      head.features = table_of(*features);
      head.feature_rows = data<int64_t>(feature_rows);
    }
  } else {
    STD_TORCH_CHECK(inputs.has_value(), "local_trees: a head without a state needs its input rows");
  }
  STD_TORCH_CHECK(!log_prior.has_value() || is_floats(*log_prior, {vocab}),
                  "local_trees: the prior must be float32 [V']");
  STD_TORCH_CHECK(!roots.has_value() || is_floats(*roots, {num_reqs, input_columns}),
                  "local_trees: root inputs must be float32 [R, ", input_columns, "]");
  const int64_t term_columns = rnn ? 3 * state_size : rank;
  STD_TORCH_CHECK(
      !slot_terms.has_value() ||
          (roots.has_value() && is_floats(*slot_terms, {num_reqs, num_depths, term_columns})),
      "local_trees: terms of slots must be float32 [R, D, ", term_columns,
      "], of a head that reads the anchor");
  STD_TORCH_CHECK(!slot_confidence.has_value() ||
                      (is_floats(*slot_confidence, {num_reqs, num_depths}) &&
                       token_confidence.has_value() && is_floats(*token_confidence, {vocab})),
                  "local_trees: confidences must be float32 [R, D] by slot and [V'] by token");
  const float *prior = data<float>(log_prior), *root_rows = data<float>(roots),
              *term_rows = data<float>(slot_terms), *by_slot = data<float>(slot_confidence),
              *by_token = data<float>(token_confidence), *a = data<float>(alpha),
              *b = data<float>(beta);
  const float trust = static_cast<float>(confidence_weight);
  for (int64_t d = 0; d < num_depths; ++d)
    STD_TORCH_CHECK(b[d] == 0.0f || prior != nullptr, "local_trees: beta without a prior");
  STD_TORCH_CHECK(num_depths == 0 || a[0] == 0.0f || root_rows != nullptr,
                  "local_trees: depth 1 is corrected only when the anchor is read");
  STD_TORCH_CHECK(is_tensor(token_ids, ScalarType::Long, {num_reqs, capacity}) &&
                      is_ints(parents, {num_reqs, capacity}) &&
                      is_ints(node_depths, {num_reqs, capacity}) &&
                      is_floats(scores, {num_reqs, capacity}),
                  "local_trees: outputs must be [R, N]");
  const int64_t* id = data<int64_t>(ids);
  const float* log_prob = data<float>(log_probs);
  for (int64_t i = 0; i < ids.numel(); ++i)
    STD_TORCH_CHECK(0 <= id[i] && id[i] < vocab, "local_trees: candidate ", id[i],
                    " is outside the draft vocabulary of ", vocab);

  std::vector<Tree> trees(num_reqs);
  Frontier frontier, next;
  int32_t deepest = 0;
  for (int64_t r = 0; r < num_reqs; ++r) {
    Tree& t = trees[r];
    t.budget = data<int32_t>(budgets)[r];
    t.depth = data<int32_t>(depths)[r];
    STD_TORCH_CHECK(t.budget <= capacity && t.depth <= num_depths, "local_trees: request ", r,
                    " asks for ", t.budget, " nodes, depth ", t.depth, "; possible are ", capacity,
                    " and ", num_depths);
    if (t.budget <= 0 || t.depth <= 0) continue;
    deepest = std::max(deepest, t.depth);
    frontier.request.push_back(static_cast<int32_t>(r));
    frontier.number.push_back(-1);
    frontier.parent_row.push_back(-1);
    frontier.token.push_back(-1);
    frontier.score.push_back(0.0);
  }

  Branches branches[2];
  Buffer<float> gate_buffer, products, fused, base;
  Buffer<uint32_t> operands, packed;
  std::vector<float> root_inputs;
  std::vector<std::pair<float, int32_t>> best;
  const int64_t padded = padded_to(num_candidates, kGroup);
  const int rank_words = words_of(head, rank);
  int now = 0;
  // The terms of the slot that drafts the children of each node of a frontier at `depth`.
  std::vector<const float*> terms;
  const auto terms_of = [&](const Frontier& nodes, int64_t depth) -> const auto& {
    terms.clear();
    if (term_rows != nullptr)
      for (const int32_t r : nodes.request)
        terms.push_back(term_rows + (r * num_depths + depth) * term_columns);
    return terms;
  };
  if (root_rows != nullptr && frontier.size()) {
    for (const int32_t r : frontier.request)
      root_inputs.insert(root_inputs.end(), root_rows + r * input_columns,
                         root_rows + (r + 1) * input_columns);
    read_tokens(head, branches[1], frontier.token.data(), frontier.parent_row.data(),
                frontier.size(), root_inputs.data(), terms_of(frontier, 0), branches[0],
                gate_buffer, operands);
  }
  for (int32_t depth = 1; depth <= deepest && frontier.size(); ++depth) {
    Branches& read = branches[now];
    const float weight = a[depth - 1], discount = b[depth - 1];
    next.clear();
    for (int64_t begin = 0, end; begin < frontier.size(); begin = end) {
      const int32_t r = frontier.request[begin];
      for (end = begin; end < frontier.size() && frontier.request[end] == r;) ++end;
      const int64_t at = (r * num_depths + depth - 1) * num_candidates;
      const int64_t* candidates = id + at;
      float* own = base.get(padded);
      std::copy_n(log_prob + at, num_candidates, own);
      std::fill(own + num_candidates, own + padded, kNone);
      const bool corrected = weight != 0.0f || discount != 0.0f;
      const float mass = corrected ? std::min(log_sum_exp(own, padded), 0.0f) : 0.0f;
      if (discount != 0.0f)
        for (int64_t j = 0; j < num_candidates; ++j) own[j] -= discount * prior[candidates[j]];
      const float* product = nullptr;
      if (weight != 0.0f) {
        Packed columns;
        uint32_t* words = packed.get(padded * rank_words);
        pack_outputs(head, candidates, num_candidates, words);
        columns.data = reinterpret_cast<const char*>(words);
        columns.groups = padded / kGroup;
        columns.words = rank_words;
        float* out = products.get((end - begin) * padded);
        multiply(head.variant, read.rank_op.data() + begin * rank_words, end - begin, columns, out);
        product = out;
      }
      float* mixed = fused.get(padded);
      Tree& tree = trees[r];
      for (int64_t f = begin; f < end; ++f) {
        const float* values = own;
        if (product != nullptr) {
          add_scaled(own, product + (f - begin) * padded, weight, padded, mixed);
          values = mixed;
        }
        float offset = corrected ? mass - log_sum_exp(values, padded) : 0.0f;
        if (by_slot != nullptr) {
          // The anchor is no draft id: what it adds is in its slot's.
          const float of_token = depth == 1 ? 0.0f : by_token[frontier.token[f]];
          offset += trust * log_sigmoid(by_slot[r * num_depths + depth - 1] + of_token);
        }
        add_children(tree, frontier, f, depth, candidates, values, num_candidates, offset,
                     static_cast<size_t>(width), best);
      }
      std::sort(tree.pool.begin(), tree.pool.end(), comes_first);
      if (static_cast<int32_t>(tree.pool.size()) >= tree.budget) {
        tree.pool.resize(tree.budget);
        tree.floor = tree.pool.back().score;
      }
      if (depth == tree.depth) continue;
      for (const Node& node : tree.pool) {
        if (node.depth != depth) continue;
        next.request.push_back(r);
        next.number.push_back(node.number);
        next.parent_row.push_back(node.row);
        next.token.push_back(node.token);
        next.score.push_back(node.score);
      }
    }
    if (next.size() && depth < deepest) {
      // Nothing was read before depth 2 when the anchor is not fed.
      if (depth == 1 && root_rows == nullptr)
        std::fill(next.parent_row.begin(), next.parent_row.end(), -1);
      read_tokens(head, branches[now], next.token.data(), next.parent_row.data(), next.size(),
                  nullptr, terms_of(next, depth), branches[1 - now], gate_buffer, operands);
      now = 1 - now;
    }
    std::swap(frontier, next);
  }

  int32_t* count = data<int32_t>(counts);
  std::vector<int32_t> place;
  for (int64_t r = 0; r < num_reqs; ++r) {
    const Tree& tree = trees[r];
    place.assign(static_cast<size_t>(tree.seen), -1);
    count[r] = static_cast<int32_t>(tree.pool.size());
    for (int32_t n = 0; n < count[r]; ++n) place[tree.pool[n].number] = n;
    for (int32_t n = 0; n < count[r]; ++n) {
      const Node& node = tree.pool[n];
      const int64_t at = r * capacity + n;
      data<int64_t>(token_ids)[at] = node.token;
      data<int32_t>(parents)[at] = node.parent < 0 ? -1 : place[node.parent];
      data<int32_t>(node_depths)[at] = node.depth;
      data<float>(scores)[at] = static_cast<float>(node.score);
    }
  }
}

OPERATOR(CPU, local_trees,
         "(Tensor ids, Tensor log_probs, Tensor budgets, Tensor depths, int width, Tensor "
         "alpha, Tensor beta, Tensor? log_prior, Tensor output_table, str kind, int state_size, "
         "int rank, bool silu, Tensor? inputs, Tensor? features, Tensor? feature_rows, Tensor? "
         "w_input, Tensor? w_state, Tensor? w_rank, Tensor? roots, Tensor? slot_terms, Tensor? "
         "slot_confidence, Tensor? token_confidence, float confidence_weight, Tensor(a!) "
         "token_ids, Tensor(b!) parents, Tensor(c!) node_depths, Tensor(d!) scores, Tensor(e!) "
         "counts) -> ()")

}  // namespace specplug
