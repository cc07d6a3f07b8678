// SPDX-License-Identifier: Apache-2.0
// Operators registered under torch.ops.specplug; argument shapes are documented in
// kernels/src/dispatch.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace specplug {

void tree_attn(const torch::stable::Tensor& query, const torch::stable::Tensor& key_cache,
               const torch::stable::Tensor& value_cache, torch::stable::Tensor& output,
               const torch::stable::Tensor& plan_rows, const torch::stable::Tensor& mask_words,
               const torch::stable::Tensor& block_table, double scale, int64_t layout,
               int64_t block_size, const std::optional<torch::stable::Tensor>& tables,
               const std::optional<torch::stable::Tensor>& tail_key,
               const std::optional<torch::stable::Tensor>& tail_value, int64_t window,
               double soft_cap, const std::optional<torch::stable::Tensor>& alibi_slopes,
               const std::optional<torch::stable::Tensor>& sinks, double value_scale);

void compact_kv(const std::vector<torch::stable::Tensor>& kv_caches,
                const torch::stable::Tensor& src_slots, const torch::stable::Tensor& dst_slots,
                const torch::stable::Tensor& tables);

void gather_kv(const std::vector<torch::stable::Tensor>& src_caches,
               const std::vector<torch::stable::Tensor>& dst_caches,
               const torch::stable::Tensor& src_slots, const torch::stable::Tensor& dst_slots,
               const torch::stable::Tensor& tables);

void ancestor_words(const torch::stable::Tensor& parents, const torch::stable::Tensor& row_counts,
                    torch::stable::Tensor& words);

void build_best_first(const torch::stable::Tensor& top_ids,
                      const torch::stable::Tensor& top_log_probs,
                      const torch::stable::Tensor& budgets, const torch::stable::Tensor& depths,
                      int64_t max_width, torch::stable::Tensor& token_ids,
                      torch::stable::Tensor& parents, torch::stable::Tensor& node_depths,
                      torch::stable::Tensor& scores, torch::stable::Tensor& counts);

int64_t ngram_lookup(const torch::stable::Tensor& tokens, torch::stable::Tensor& links,
                     torch::stable::Tensor& heads, int64_t indexed, int64_t longest,
                     torch::stable::Tensor& sizes, torch::stable::Tensor& found);

int64_t ngram_graft(const torch::stable::Tensor& tokens, const torch::stable::Tensor& links,
                    const torch::stable::Tensor& heads, int64_t longest,
                    const torch::stable::Tensor& shares, int64_t width, int64_t depth,
                    int64_t vocab_size, const torch::stable::Tensor& tree_tokens,
                    const torch::stable::Tensor& tree_parents,
                    const torch::stable::Tensor& tree_scores, torch::stable::Tensor& out_tokens,
                    torch::stable::Tensor& out_parents, torch::stable::Tensor& out_depths,
                    torch::stable::Tensor& out_scores);

}  // namespace specplug
