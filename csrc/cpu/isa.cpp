// SPDX-License-Identifier: Apache-2.0
// Which instruction-set variants this machine can run, and which one is used.
#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <string>

#include "tensors.h"
#include "tree_attn.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specplug {

namespace {

bool request_amx() {
#if defined(__linux__) && defined(__x86_64__)
  // Tile data must be granted once per process before the first tile instruction.
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

unsigned detect() {
  unsigned mask = 1u << kPlain;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2"))
    mask |= 1u << kAvx2;
  if ((mask & (1u << kAvx2)) && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    mask |= 1u << kAvx512;
  if ((mask & (1u << kAvx512)) && __builtin_cpu_supports("avx512bf16")) mask |= 1u << kAvx512Bf16;
  if ((mask & (1u << kAvx512Bf16)) && __builtin_cpu_supports("amx-tile") &&
      __builtin_cpu_supports("amx-bf16") && request_amx())
    mask |= 1u << kAmx;
#endif
  return mask;
}

std::atomic<int> limit{kAmx};

bool isa_supported(int isa) {
  static const unsigned mask = detect();
  return mask >> isa & 1u;
}

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
  limit.store(static_cast<int>(isa), std::memory_order_relaxed);
}

std::string cpu_variant(bool bf16) { return select_variant(bf16)->name; }

}  // namespace

bool isa_allowed(int isa) {
  return limit.load(std::memory_order_relaxed) >= isa && isa_supported(isa);
}

const AttnVariant* select_variant([[maybe_unused]] bool bf16) {
#if defined(__x86_64__)
  if (bf16) {
    if (isa_allowed(kAmx)) return variant_amx();
    if (isa_allowed(kAvx512Bf16)) return variant_avx512_bf16();
  }
  if (isa_allowed(kAvx512)) return variant_avx512();
  if (isa_allowed(kAvx2)) return variant_avx2();
#endif
  return variant_plain();
}

OPERATOR(CompositeExplicitAutograd, cpu_isas, "() -> int")
OPERATOR(CompositeExplicitAutograd, allowed_cpu_isas, "() -> int")
OPERATOR(CompositeExplicitAutograd, set_cpu_isa, "(int isa) -> ()")
OPERATOR(CompositeExplicitAutograd, cpu_variant, "(bool bf16) -> str")

}  // namespace specplug
