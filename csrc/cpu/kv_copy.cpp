// SPDX-License-Identifier: Apache-2.0
// Copies chosen tokens' K and V, in all layers: to other caches, or to other slots of the same.
#include "tensors.h"

namespace specplug {

namespace {

// Caches [blocks, Hkv, block, 2 * Dh] of one shape and one layout.
struct Caches {
  std::vector<char*> bases;
  int64_t num_slots, num_heads, block_stride, head_stride;
  size_t element;
};

Caches describe_caches(const std::vector<Tensor>& caches, int64_t block_size, int64_t interior,
                       const char* name) {
  const Tensor& like = caches[0];
  STD_TORCH_CHECK(like.dim() == 4, "copy_kv: ", name, " must be [blocks, Hkv, block, 2*Dh]");
  Caches out{{},
             like.size(0) * block_size,
             like.size(1),
             like.stride(0),
             like.stride(1),
             static_cast<size_t>(like.element_size())};
  for (const Tensor& kv : caches) {
    STD_TORCH_CHECK(kv.dim() == 4 && kv.size(0) == like.size(0) && kv.size(1) == out.num_heads &&
                        kv.size(2) * kv.size(3) == 2 * interior &&
                        kv.stride(0) == out.block_stride && kv.stride(1) == out.head_stride &&
                        kv.stride(2) == kv.size(3) && kv.stride(3) == 1 &&
                        static_cast<size_t>(kv.element_size()) == out.element &&
                        (out.element == 1 || out.element == 2 || out.element == 4),
                    "copy_kv: all of ", name, " must share one shape [blocks, Hkv, block, 2*Dh]");
    out.bases.push_back(data<char>(kv));
  }
  return out;
}

template <class T>
void copy_token(const T* src, T* dst, const int32_t* from, const int32_t* to, int64_t head_size) {
  for (int64_t d = 0; d < head_size; ++d) dst[to[d]] = src[from[d]];
}

void copy_kv(const std::vector<Tensor>& src_caches, const std::vector<Tensor>& dst_caches,
             const Tensor& src_slots, const Tensor& dst_slots, const Tensor& tables) {
  STD_TORCH_CHECK(src_caches.size() == dst_caches.size(),
                  "copy_kv: there must be as many source caches as destination caches");
  STD_TORCH_CHECK(is_tensor(tables, ScalarType::Int, {2, kAny, kAny}),
                  "copy_kv: tables must be int32 [2, block, head]");
  const int64_t count = dst_slots.numel();
  if (count == 0 || src_caches.empty()) return;
  const int64_t block_size = tables.size(1);
  const int64_t head_size = tables.size(2);
  const int64_t interior = block_size * head_size;
  const Caches src = describe_caches(src_caches, block_size, interior, "src_caches");
  const Caches dst = describe_caches(dst_caches, block_size, interior, "dst_caches");
  STD_TORCH_CHECK(src.num_heads == dst.num_heads && src.element == dst.element,
                  "copy_kv: source and destination differ in heads or dtype");
  const int64_t layers = static_cast<int64_t>(src.bases.size());
  STD_TORCH_CHECK(is_tensor(src_slots, ScalarType::Long, {kAny, kAny, count}) &&
                      is_tensor(dst_slots, ScalarType::Long, {count}) &&
                      (src_slots.size(0) == layers || src_slots.size(0) == 1) &&
                      (src_slots.size(1) == src.num_heads || src_slots.size(1) == 1),
                  "copy_kv: src_slots must be int64 [layers or 1, Hkv or 1, M], dst_slots [M]");
  const int64_t* from = data<int64_t>(src_slots);
  const int64_t* to = data<int64_t>(dst_slots);
  for (int64_t i = 0; i < src_slots.numel(); ++i)
    STD_TORCH_CHECK(from[i] >= 0 && from[i] < src.num_slots, "copy_kv: source slot ", from[i],
                    " is outside ", src.num_slots, " slots");
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(to[i] >= 0 && to[i] < dst.num_slots, "copy_kv: destination slot ", to[i],
                    " is outside ", dst.num_slots, " slots");

  const int32_t* k_table = data<int32_t>(tables);
  const int32_t* v_table = k_table + interior;
  const int64_t layer_step = src_slots.size(0) == 1 ? 0 : src_slots.size(1) * count;
  const int64_t head_step = src_slots.size(1) == 1 ? 0 : count;
  // Copies of one head run in order: a later source may be an earlier copy's neighbour.
  const auto run = [&](auto tag) {
    using T = decltype(tag);
    torch::stable::parallel_for(
        0, layers * src.num_heads, 1 + 4096 / (count * head_size), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t layer = i / src.num_heads, head = i % src.num_heads;
            const bool same = src.bases[layer] == dst.bases[layer];
            const T* source = reinterpret_cast<const T*>(src.bases[layer]) + head * src.head_stride;
            T* target = reinterpret_cast<T*>(dst.bases[layer]) + head * dst.head_stride;
            const int64_t* slots = from + layer * layer_step + head * head_step;
            for (int64_t m = 0; m < count; ++m) {
              if (same && slots[m] == to[m]) continue;
              const T* s = source + slots[m] / block_size * src.block_stride;
              T* d = target + to[m] / block_size * dst.block_stride;
              const int64_t a = slots[m] % block_size * head_size;
              const int64_t b = to[m] % block_size * head_size;
              copy_token(s, d, k_table + a, k_table + b, head_size);
              copy_token(s + interior, d + interior, v_table + a, v_table + b, head_size);
            }
          }
        });
  };
  if (src.element == 1)
    run(uint8_t{});
  else if (src.element == 2)
    run(uint16_t{});
  else
    run(uint32_t{});
}

}  // namespace

OPERATOR(CPU, copy_kv,
         "(Tensor[] src_caches, Tensor(a!)[] dst_caches, Tensor src_slots, Tensor dst_slots, "
         "Tensor tables) -> ()")

}  // namespace specplug
