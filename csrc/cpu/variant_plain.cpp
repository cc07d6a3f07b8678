// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <type_traits>

#include "tree_attn.h"

#define VEC_WORDS 4
#define MAX_ROWS 3
#define MAX_PANELS 1
#define VEC_ROWS 0
#define BF16_DOT 0

namespace specplug {
#include "variant.inl"

const AttnVariant* variant_plain() {
  static constexpr AttnVariant variant = make_variant("plain");
  return &variant;
}
}  // namespace specplug
