// SPDX-License-Identifier: Apache-2.0
// The products of one instruction set. Included once per translation unit, after a
// `#pragma GCC target`, with BF16_DOT as in `packed_columns.inl`.
#include "packed_columns.inl"
// The next files use it.
#include "compressed_products.inl"
#include "int4_products.inl"

namespace specplug {
namespace {

constexpr PairProducts kPairProducts = {kTakesTiles,           compressed::kFewRows,
                                        compressed::kManyRows, compressed::multiply,
                                        int4::kMostRows,       int4::multiply};

}  // namespace
}  // namespace specplug
