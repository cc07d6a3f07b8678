// SPDX-License-Identifier: Apache-2.0
// Writes the keys and values of new tokens to their slots, as kernels/src/finite_values.py has it.
#include "lanes.h"
#include "tensors.h"
#include "tree_attn.h"

namespace specplug {

namespace {

// Where the numbers of one token lie inside a block of one head, in elements.
struct Place {
  LayoutKind kind;
  int64_t block_size, head_size;
  const int32_t *k_table, *v_table;
};

template <class T>
ALWAYS_INLINE void put_key(T* block, const Place& p, int64_t token, const T* from) {
  if (p.kind == LayoutKind::kVec) {
    for (int64_t d = 0; d < p.head_size; ++d) block[token + d * p.block_size] = from[d];
  } else if (p.kind == LayoutKind::kVnni) {
    T* out = block + token / kPanel * kPanel * p.head_size + token % kPanel * 2;
    for (int64_t d = 0; d < p.head_size; d += 2)
      std::memcpy(out + d * kPanel, from + d, 2 * sizeof(T));
  } else {
    const int32_t* at = p.k_table + token * p.head_size;
    for (int64_t d = 0; d < p.head_size; ++d) block[at[d]] = from[d];
  }
}

template <class T>
ALWAYS_INLINE void put_value(T* block, const Place& p, int64_t token, const T* from) {
  if (p.kind == LayoutKind::kVec) {
    std::memcpy(block + token * p.head_size, from, static_cast<size_t>(p.head_size) * sizeof(T));
  } else if (p.kind == LayoutKind::kVnni) {
    T* out = block + token / 2 * 2 * kPanel + token % 2;
    for (int64_t panel = 0; panel < p.head_size; panel += kPanel)
      for (int64_t d = 0; d < kPanel; ++d) out[panel * p.block_size + d * 2] = from[panel + d];
  } else {
    const int32_t* at = p.v_table + token * p.head_size;
    for (int64_t d = 0; d < p.head_size; ++d) block[at[d]] = from[d];
  }
}

// Exponents of numbers that are not finite, and a NaN of theirs.
struct Format {
  uint32_t exponent, nan;
};

template <class T>
ALWAYS_INLINE void put_token(T* block, const Place& p, int64_t token, const T* key, const T* value,
                             int64_t v_offset, Format format) {
  const T exponent = static_cast<T>(format.exponent);
  T found = 0;
  for (int64_t d = 0; d < p.head_size; ++d)
    found |= static_cast<T>((value[d] & exponent) == exponent);
  if (__builtin_expect(found != 0, 0)) {
    T own_key[kMaxHeadSize], own_value[kMaxHeadSize];
    for (int64_t d = 0; d < p.head_size; ++d) {
      own_key[d] = static_cast<T>(format.nan);
      own_value[d] = (value[d] & exponent) == exponent ? T{0} : value[d];
    }
    put_key(block, p, token, own_key);
    put_value(block + v_offset, p, token, own_value);
    return;
  }
  put_key(block, p, token, key);
  put_value(block + v_offset, p, token, value);
}

// Keys, values and slots of a call.
struct Source {
  Heads key, value, cache;
  const int64_t* slots;
  int64_t num_heads, v_offset;
  Place place;
  Format format;
};

template <class T>
ALWAYS_INLINE void put_tokens(const Source& s, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    if (s.slots[t] < 0) continue;
    T* block = reinterpret_cast<T*>(s.cache.base) + s.slots[t] / s.place.block_size * s.cache.row;
    const int64_t token = s.slots[t] % s.place.block_size;
    const T* key = reinterpret_cast<const T*>(s.key.base) + t * s.key.row;
    const T* value = reinterpret_cast<const T*>(s.value.base) + t * s.value.row;
    for (int64_t h = 0; h < s.num_heads; ++h)
      put_token(block + h * s.cache.head, s.place, token, key + h * s.key.head,
                value + h * s.value.head, s.v_offset, s.format);
  }
}

CLONED void put_halves(const Source& s, int64_t begin, int64_t end) {
  put_tokens<uint16_t>(s, begin, end);
}

CLONED void put_words(const Source& s, int64_t begin, int64_t end) {
  put_tokens<uint32_t>(s, begin, end);
}

void store_kv(const Tensor& key, const Tensor& value, Tensor& kv_cache, const Tensor& slots,
              int64_t layout, const Tensor& tables) {
  const ScalarType dtype = kv_cache.scalar_type();
  const bool word = dtype == ScalarType::Float, bf16 = dtype == ScalarType::BFloat16;
  STD_TORCH_CHECK(word || bf16 || dtype == ScalarType::Half,
                  "store_kv: the cache must be bfloat16, float16 or float32");
  STD_TORCH_CHECK(is_tensor(tables, ScalarType::Int, {2, kAny, kAny}) && layout >= 0 && layout <= 2,
                  "store_kv: tables must be int32 [2, block, head] of a known layout");
  Source s = {};
  Place& p = s.place;
  p.kind = static_cast<LayoutKind>(layout);
  p.block_size = tables.size(1);
  p.head_size = tables.size(2);
  const int64_t interior = p.block_size * p.head_size;
  p.k_table = data<int32_t>(tables);
  p.v_table = p.k_table + interior;
  STD_TORCH_CHECK(p.head_size > 0 && p.head_size <= kMaxHeadSize && p.block_size > 0,
                  "store_kv: head size ", p.head_size, " is not one up to ", kMaxHeadSize);
  STD_TORCH_CHECK(p.kind != LayoutKind::kVnni ||
                      (!word && p.head_size % kPanel == 0 && p.block_size % kPanel == 0),
                  "store_kv: this layout has blocks and heads of ", kPanel, " numbers of 16 bits");
  STD_TORCH_CHECK(kv_cache.is_cpu() && kv_cache.dim() == 4 && kv_cache.size(2) == p.block_size &&
                      kv_cache.size(3) == 2 * p.head_size &&
                      kv_cache.stride(2) == kv_cache.size(3) && kv_cache.stride(3) == 1,
                  "store_kv: the cache must be [blocks, Hkv, block, 2 * Dh] and fit the tables");
  s.num_heads = kv_cache.size(1);
  const auto fits = [&](const Tensor& t) {
    return t.is_cpu() && t.scalar_type() == dtype && t.dim() == 3 && t.size(1) == s.num_heads &&
           t.size(2) == p.head_size && t.stride(2) == 1;
  };
  STD_TORCH_CHECK(fits(key) && fits(value) && key.size(0) == value.size(0),
                  "store_kv: key and value must be [T, Hkv, Dh] like the cache");
  const int64_t rows = key.size(0);
  STD_TORCH_CHECK(
      slots.is_cpu() && is_tensor(slots, ScalarType::Long, {kAny}) && slots.size(0) >= rows,
      "store_kv: slots must be int64 [T]");
  s.slots = data<int64_t>(slots);
  const int64_t limit = kv_cache.size(0) * p.block_size;
  for (int64_t t = 0; t < rows; ++t)
    STD_TORCH_CHECK(s.slots[t] < limit, "store_kv: slot ", s.slots[t], " is outside ", limit,
                    " slots");
  s.key = heads_of(key);
  s.value = heads_of(value);
  s.cache = heads_of(kv_cache);
  s.v_offset = interior;
  s.format = word   ? Format{0x7f800000u, 0x7fc00000u}
             : bf16 ? Format{0x7f80u, 0x7fc0u}
                    : Format{0x7c00u, 0x7e00u};
  const auto put = word ? put_words : put_halves;
  const int64_t grain = 1 + 16384 / (s.num_heads * p.head_size);
  if (rows <= grain) {
    put(s, 0, rows);
    return;
  }
  torch::stable::parallel_for(0, rows, grain,
                              [&](int64_t begin, int64_t end) { put(s, begin, end); });
}

}  // namespace

OPERATOR(CPU, store_kv,
         "(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slots, int layout, Tensor tables) "
         "-> ()")

}  // namespace specplug
