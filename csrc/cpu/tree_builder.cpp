// SPDX-License-Identifier: Apache-2.0
// Exact best-first trees from per-depth candidates, for a batch of requests.
#include <algorithm>
#include <cmath>
#include <vector>

#include "tensors.h"

namespace specplug {

namespace {

// A candidate: rank `rank` of depth row + 1 below node `parent`. Scores are doubles, so that paths
// of equal summands tie as they do in the Python builder.
struct Candidate {
  double score;
  int32_t order;  // of entry; breaks ties, earlier first
  int32_t parent, row, rank;
  double parent_score;
};

bool comes_later(const Candidate& a, const Candidate& b) {
  return a.score < b.score || (a.score == b.score && a.order > b.order);
}

struct Output {
  int64_t* token_ids;
  int32_t *parents, *depths;
  float* scores;
};

// No probability is above 1, whatever rounding left: a child never scores more than its parent.
double log_prob_of(float log_prob) { return std::min(log_prob, 0.0f); }

// Candidates of a depth end at the first that is not finite.
bool usable(const float* log_probs, int64_t width, int64_t row, int64_t rank, int64_t limit) {
  return rank < limit && std::isfinite(log_probs[row * width + rank]);
}

int32_t build_one(const int64_t* ids, const float* log_probs, int64_t width, int64_t rows,
                  int64_t ranks, int32_t budget, std::vector<Candidate>& heap, const Output& out) {
  if (budget <= 0 || rows <= 0 || !usable(log_probs, width, 0, 0, ranks)) return 0;
  heap.clear();
  heap.push_back({log_prob_of(log_probs[0]), 0, -1, 0, 0, 0.0});
  int32_t entered = 1;
  int32_t node = 0;
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), comes_later);
    const Candidate top = heap.back();
    heap.pop_back();
    out.token_ids[node] = ids[top.row * width + top.rank];
    out.parents[node] = top.parent;
    out.depths[node] = top.row + 1;
    out.scores[node] = static_cast<float>(top.score);
    if (++node == budget) break;
    const auto push = [&](int32_t parent, int32_t row, int32_t rank, double base) {
      heap.push_back(
          {base + log_prob_of(log_probs[row * width + rank]), entered++, parent, row, rank, base});
      std::push_heap(heap.begin(), heap.end(), comes_later);
    };
    if (usable(log_probs, width, top.row, top.rank + 1, ranks))
      push(top.parent, top.row, top.rank + 1, top.parent_score);
    if (top.row + 1 < rows && usable(log_probs, width, top.row + 1, 0, ranks))
      push(node - 1, top.row + 1, 0, top.score);
  }
  return node;
}

void build_best_first(const Tensor& top_ids, const Tensor& top_log_probs, const Tensor& budgets,
                      const Tensor& depths, int64_t max_width, Tensor& token_ids, Tensor& parents,
                      Tensor& node_depths, Tensor& scores, Tensor& counts) {
  const int64_t num_reqs = top_ids.size(0), capacity = token_ids.size(1);
  STD_TORCH_CHECK(
      is_tensor(top_ids, ScalarType::Long, {kAny, kAny, kAny}) &&
          is_tensor(top_log_probs, ScalarType::Float, {num_reqs, top_ids.size(1), top_ids.size(2)}),
      "build_best_first: candidates must be int64 and float32 [B, D, K]");
  const int64_t num_rows = top_ids.size(1), width = top_ids.size(2);
  STD_TORCH_CHECK(is_tensor(budgets, ScalarType::Int, {num_reqs}) &&
                      is_tensor(depths, ScalarType::Int, {num_reqs}) &&
                      is_tensor(counts, ScalarType::Int, {num_reqs}),
                  "build_best_first: budgets, depths and counts must be int32 [B]");
  STD_TORCH_CHECK(is_tensor(token_ids, ScalarType::Long, {num_reqs, capacity}) &&
                      is_tensor(parents, ScalarType::Int, {num_reqs, capacity}) &&
                      is_tensor(node_depths, ScalarType::Int, {num_reqs, capacity}) &&
                      is_tensor(scores, ScalarType::Float, {num_reqs, capacity}),
                  "build_best_first: outputs must be [B, N]");
  STD_TORCH_CHECK(max_width >= 1, "build_best_first: max_width must be at least 1");
  const int32_t* budget = data<int32_t>(budgets);
  const int32_t* depth = data<int32_t>(depths);
  for (int64_t b = 0; b < num_reqs; ++b)
    STD_TORCH_CHECK(budget[b] <= capacity, "build_best_first: budget ", budget[b], " of request ",
                    b, " exceeds the ", capacity, " nodes of the output");
  int32_t* count = data<int32_t>(counts);
  std::vector<Candidate> heap;
  for (int64_t b = 0; b < num_reqs; ++b) {
    const int64_t in = b * num_rows * width;
    const int64_t at = b * capacity;
    const Output out = {data<int64_t>(token_ids) + at, data<int32_t>(parents) + at,
                        data<int32_t>(node_depths) + at, data<float>(scores) + at};
    count[b] = build_one(data<int64_t>(top_ids) + in, data<float>(top_log_probs) + in, width,
                         std::min<int64_t>(num_rows, depth[b]), std::min(width, max_width),
                         budget[b], heap, out);
  }
}

}  // namespace

OPERATOR(CPU, build_best_first,
         "(Tensor top_ids, Tensor top_log_probs, Tensor budgets, Tensor depths, int max_width, "
         "Tensor(a!) token_ids, Tensor(b!) parents, Tensor(c!) node_depths, Tensor(d!) scores, "
         "Tensor(e!) counts) -> ()")

}  // namespace specplug
