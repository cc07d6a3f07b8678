// SPDX-License-Identifier: Apache-2.0
// Which instruction-set variants this machine can run, and which one is used.
#include "isa.h"

#include <atomic>
#include <cstdlib>

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

}  // namespace

const char* isa_name(int isa) {
  static const char* names[] = {"plain", "avx2", "avx512", "avx512_bf16", "amx"};
  return names[isa];
}

bool isa_supported(int isa) {
  static const unsigned mask = detect();
  return mask >> isa & 1u;
}

void set_isa_limit(int isa) { limit.store(isa, std::memory_order_relaxed); }

bool isa_allowed(int isa) {
  return limit.load(std::memory_order_relaxed) >= isa && isa_supported(isa);
}

const AttnVariant* select_variant(bool bf16) {
  if (bf16) {
    if (isa_allowed(kAmx)) return variant_amx();
    if (isa_allowed(kAvx512Bf16)) return variant_avx512_bf16();
  }
  if (isa_allowed(kAvx512)) return variant_avx512();
  if (isa_allowed(kAvx2)) return variant_avx2();
  return variant_plain();
}

}  // namespace specplug
