// SPDX-License-Identifier: Apache-2.0
// torch.ops.specplug: everything goes through torch's stable ABI, so one build serves several
// torch releases.
#include <torch/csrc/stable/library.h>

#include <string>

#include "isa.h"

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
  m.def("cpu_isas() -> int");
  m.def("allowed_cpu_isas() -> int");
  m.def("set_cpu_isa(int isa) -> ()");
  m.def("cpu_variant(bool bf16) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(specplug, CompositeExplicitAutograd, m) {
  m.impl("cpu_isas", TORCH_BOX(&cpu_isas));
  m.impl("allowed_cpu_isas", TORCH_BOX(&allowed_cpu_isas));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
  m.impl("cpu_variant", TORCH_BOX(&cpu_variant));
}

}  // namespace specplug
