// SPDX-License-Identifier: Apache-2.0
// Operators: their registration, checks of dtype and shape, data pointers, aligned buffers.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <optional>

#include "element.h"

namespace specplug {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Registers the function `name` as torch.ops.specplug.`name`, for tensors of dispatch key `key`.
// It goes through torch's stable ABI, so one build serves several torch releases.
#define OPERATOR(key, name, schema)                                   \
  STABLE_TORCH_LIBRARY_FRAGMENT(specplug, m) { m.def(#name schema); } \
  STABLE_TORCH_LIBRARY_IMPL(specplug, key, m) { m.impl(#name, TORCH_BOX(&name)); }

constexpr int64_t kAny = -1;

// Whether a tensor is contiguous and has this dtype and shape; kAny matches any size.
inline bool is_tensor(const Tensor& t, ScalarType type, std::initializer_list<int64_t> sizes) {
  if (t.scalar_type() != type || !t.is_contiguous() ||
      t.dim() != static_cast<int64_t>(sizes.size()))
    return false;
  int64_t d = 0;
  for (const int64_t size : sizes) {
    if (size != kAny && t.size(d) != size) return false;
    ++d;
  }
  return true;
}

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

template <class T>
T* data(const std::optional<Tensor>& t) {
  return t.has_value() ? data<T>(*t) : nullptr;
}

// A tensor whose rows or blocks have heads; strides in elements.
struct Heads {
  char* base;
  int64_t row, head;

  char* at(int64_t row_index, int64_t head_index, int bytes) const {
    return base + (row_index * row + head_index * head) * bytes;
  }
};

inline Heads heads_of(const Tensor& t) { return {data<char>(t), t.stride(0), t.stride(1)}; }

// The element format of a dtype; none if it has no kernel.
inline std::optional<Element> element_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return Element::kFloat;
    case ScalarType::BFloat16:
      return Element::kBfloat16;
    case ScalarType::Half:
      return Element::kFloat16;
    case ScalarType::Float8_e4m3fn:
      return Element::kE4m3;
    case ScalarType::Float8_e5m2:
      return Element::kE5m2;
    default:
      return std::nullopt;
  }
}

// Calls `run(r)` for every row, in parallel where a thread gets 16 rows.
template <class Run>
void for_rows(int64_t rows, const Run& run) {
  torch::stable::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) run(r);
  });
}

// A 64-byte aligned buffer that only grows. Growth discards its contents.
template <class T>
class Buffer {
 public:
  T* get(int64_t count) {
    if (count > size_) {
      size_ = (count + count / 2 + 63) / 64 * 64;
      data_.reset(static_cast<T*>(std::aligned_alloc(64, size_ * sizeof(T))));
      STD_TORCH_CHECK(data_ != nullptr, "out of memory for ", size_ * sizeof(T), " bytes");
    }
    return data_.get();
  }
  T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

}  // namespace specplug
