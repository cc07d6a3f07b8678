// SPDX-License-Identifier: Apache-2.0
// torch.ops.specplug: everything goes through torch's stable ABI, so one build serves several
// torch releases.
#include <torch/csrc/stable/library.h>

#include "isa.h"
#include "ops.h"

namespace specplug {

template <class F>
int64_t mask_of(const F& holds) {
  int64_t mask = 0;
  for (int isa = 0; isa < kNumIsas; ++isa)
    if (holds(isa)) mask |= int64_t{1} << isa;
  return mask;
}

// Bit i is set when instruction set i (plain, avx2, avx512, avx512_bf16, amx) can run here.
int64_t cpu_isas() { return mask_of(isa_supported); }

// The same, within what `set_cpu_isa` allows.
int64_t allowed_cpu_isas() { return mask_of(isa_allowed); }

void set_cpu_isa(int64_t isa) {
  STD_TORCH_CHECK(isa >= 0 && isa < kNumIsas && isa_supported(static_cast<int>(isa)),
                  "set_cpu_isa: instruction set ", isa, " cannot run on this machine");
  set_isa_limit(static_cast<int>(isa));
}

std::string cpu_variant(bool bf16) { return select_variant(bf16)->name; }

STABLE_TORCH_LIBRARY(specplug, m) {
  m.def(
      "tree_attn(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output, "
      "Tensor plan, Tensor mask_words, Tensor block_table, float scale, int layout, "
      "int block_size, Tensor? tables, Tensor? tail_key, Tensor? tail_value, "
      "int window=0, float soft_cap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "
      "float value_scale=1.0) -> ()");
  m.def(
      "compact_kv(Tensor(a!)[] kv_caches, Tensor src_slots, Tensor dst_slots, Tensor tables) "
      "-> ()");
  m.def(
      "gather_kv(Tensor[] src_caches, Tensor(a!)[] dst_caches, Tensor src_slots, "
      "Tensor dst_slots, Tensor tables) -> ()");
  m.def("ancestor_words(Tensor parents, Tensor row_counts, Tensor(a!) words) -> ()");
  m.def(
      "build_best_first(Tensor top_ids, Tensor top_log_probs, Tensor budgets, Tensor depths, "
      "int max_width, Tensor(a!) token_ids, Tensor(b!) parents, Tensor(c!) node_depths, "
      "Tensor(d!) scores, Tensor(e!) counts) -> ()");
  m.def(
      "ngram_lookup(Tensor tokens, Tensor(a!) links, Tensor(b!) heads, int indexed, int longest, "
      "Tensor(c!) sizes, Tensor(d!) found) -> int");
  m.def(
      "ngram_graft(Tensor tokens, Tensor links, Tensor heads, int longest, Tensor shares, "
      "int width, int depth, int vocab_size, Tensor tree_tokens, Tensor tree_parents, Tensor "
      "tree_scores, "
      "Tensor(a!) out_tokens, Tensor(b!) out_parents, Tensor(c!) out_depths, "
      "Tensor(d!) out_scores) -> int");
  m.def("cpu_isas() -> int");
  m.def("allowed_cpu_isas() -> int");
  m.def("set_cpu_isa(int isa) -> ()");
  m.def("cpu_variant(bool bf16) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(specplug, CPU, m) {
  m.impl("tree_attn", TORCH_BOX(&tree_attn));
  m.impl("compact_kv", TORCH_BOX(&compact_kv));
  m.impl("gather_kv", TORCH_BOX(&gather_kv));
  m.impl("ancestor_words", TORCH_BOX(&ancestor_words));
  m.impl("build_best_first", TORCH_BOX(&build_best_first));
  m.impl("ngram_lookup", TORCH_BOX(&ngram_lookup));
  m.impl("ngram_graft", TORCH_BOX(&ngram_graft));
}

STABLE_TORCH_LIBRARY_IMPL(specplug, CompositeExplicitAutograd, m) {
  m.impl("cpu_isas", TORCH_BOX(&cpu_isas));
  m.impl("allowed_cpu_isas", TORCH_BOX(&allowed_cpu_isas));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
  m.impl("cpu_variant", TORCH_BOX(&cpu_variant));
}

}  // namespace specplug
