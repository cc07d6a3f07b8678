// SPDX-License-Identifier: Apache-2.0
// Moves the K and V of accepted slots to their final places, in all layers.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "ops.h"

namespace specplug {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

struct Move {
  int64_t src_block, dst_block;  // elements from the start of the cache, without the head
  const int32_t *src_k, *dst_k, *src_v, *dst_v;  // [head_size] offsets inside a block
};

template <class T>
void move_head(T* head, const std::vector<Move>& moves, int64_t head_size, int64_t v_offset) {
  for (const Move& move : moves) {
    const T* src = head + move.src_block;
    T* dst = head + move.dst_block;
    for (int64_t d = 0; d < head_size; ++d) dst[move.dst_k[d]] = src[move.src_k[d]];
    src += v_offset;
    dst += v_offset;
    for (int64_t d = 0; d < head_size; ++d) dst[move.dst_v[d]] = src[move.src_v[d]];
  }
}

}  // namespace

void compact_kv(const std::vector<Tensor>& kv_caches, const Tensor& src_slots,
                const Tensor& dst_slots, const Tensor& tables) {
  const int64_t num_moves = src_slots.numel();
  STD_TORCH_CHECK(src_slots.scalar_type() == ScalarType::Long &&
                      dst_slots.scalar_type() == ScalarType::Long && src_slots.dim() == 1 &&
                      dst_slots.dim() == 1 && src_slots.is_contiguous() &&
                      dst_slots.is_contiguous() && dst_slots.numel() == num_moves,
                  "compact_kv: src_slots and dst_slots must be int64 [P] of one length");
  STD_TORCH_CHECK(tables.scalar_type() == ScalarType::Int && tables.dim() == 3 &&
                      tables.size(0) == 2 && tables.is_contiguous(),
                  "compact_kv: tables must be int32 [2, block, head]");
  if (num_moves == 0 || kv_caches.empty()) return;
  const int64_t block_size = tables.size(1);
  const int64_t head_size = tables.size(2);
  const int64_t interior = block_size * head_size;
  const Tensor& like = kv_caches[0];
  STD_TORCH_CHECK(like.dim() == 4, "compact_kv: caches must be [blocks, Hkv, block, 2*Dh]");
  const int64_t num_blocks = like.size(0);
  const int64_t num_heads = like.size(1);
  const int64_t block_stride = like.stride(0);
  const int64_t head_stride = like.stride(1);
  const size_t element = like.element_size();
  for (const Tensor& kv : kv_caches)
    STD_TORCH_CHECK(kv.dim() == 4 && kv.size(0) == num_blocks && kv.size(1) == num_heads &&
                        kv.size(2) * kv.size(3) == 2 * interior && kv.stride(0) == block_stride &&
                        kv.stride(1) == head_stride && kv.stride(2) == kv.size(3) &&
                        kv.stride(3) == 1 && kv.element_size() == element &&
                        (element == 1 || element == 2 || element == 4),
                    "compact_kv: all caches must share one shape [blocks, Hkv, block, 2*Dh] that "
                    "fits block size ",
                    block_size, " and head size ", head_size);

  const int64_t* src = static_cast<const int64_t*>(src_slots.data_ptr());
  const int64_t* dst = static_cast<const int64_t*>(dst_slots.data_ptr());
  const int32_t* k_table = static_cast<const int32_t*>(tables.data_ptr());
  const int32_t* v_table = k_table + interior;
  std::vector<Move> moves;
  moves.reserve(num_moves);
  for (int64_t i = 0; i < num_moves; ++i) {
    const int64_t limit = num_blocks * block_size;
    STD_TORCH_CHECK(src[i] >= 0 && src[i] < limit && dst[i] >= 0 && dst[i] < limit,
                    "compact_kv: move ", src[i], " to ", dst[i], " is outside ", limit, " slots");
    if (src[i] == dst[i]) continue;
    const int64_t s = src[i] % block_size * head_size;
    const int64_t d = dst[i] % block_size * head_size;
    moves.push_back({src[i] / block_size * block_stride, dst[i] / block_size * block_stride,
                     k_table + s, k_table + d, v_table + s, v_table + d});
  }
  if (moves.empty()) return;

  std::vector<char*> bases;
  bases.reserve(kv_caches.size());
  for (const Tensor& kv : kv_caches) bases.push_back(static_cast<char*>(kv.data_ptr()));
  const int64_t units = static_cast<int64_t>(bases.size()) * num_heads;
  // Moves of one head run in order: a later source may be an earlier move's neighbour.
  const int64_t grain = 1 + 4096 / (static_cast<int64_t>(moves.size()) * head_size);
  torch::stable::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      char* head = bases[i / num_heads] + i % num_heads * head_stride * element;
      if (element == 1)
        move_head(reinterpret_cast<uint8_t*>(head), moves, head_size, interior);
      else if (element == 2)
        move_head(reinterpret_cast<uint16_t*>(head), moves, head_size, interior);
      else
        move_head(reinterpret_cast<uint32_t*>(head), moves, head_size, interior);
    }
  });
}

}  // namespace specplug
