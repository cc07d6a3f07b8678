// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace specplug {

enum Isa : int { kPlain = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4, kNumIsas = 5 };

// Whether this machine has an instruction set, within the limit of `set_cpu_isa`.
bool isa_allowed(int isa);

}  // namespace specplug
