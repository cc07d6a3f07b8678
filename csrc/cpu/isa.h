// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tree_attn.h"

namespace specplug {

enum Isa : int { kPlain = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4, kNumIsas = 5 };

const char* isa_name(int isa);
bool isa_supported(int isa);
// Variants above `isa` are not used.
void set_isa_limit(int isa);
// Supported and within the limit.
bool isa_allowed(int isa);

}  // namespace specplug
