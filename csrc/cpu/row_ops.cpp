// SPDX-License-Identifier: Apache-2.0
// What lies between the matrix products of a draft layer, on a handful of rows: norms, rotary
// embeddings, gates. Composed of torch's operators the norms alone take an eighth of a small head's
// draft.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <optional>

#include "lanes.h"
#include "row_ops.h"

namespace specplug {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

LANES_INLINE float float_of(float x) { return x; }

LANES_INLINE float float_of(uint16_t x) {
  const uint32_t bits = word_of(x);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

LANES_INLINE void store_one(float* p, float x) { *p = x; }

LANES_INLINE void store_one(uint16_t* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  *p = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// sum = x + delta, in the numbers' own format; out = sum / rms(sum) * weight over n numbers.
// Without delta, sum is x.
template <class T>
LANES_INLINE void norm_row(const T* x, const T* delta, const T* weight, int64_t n, float eps,
                           T* sum, T* out) {
  const int64_t whole = n / kLanes * kLanes;
  if (delta != nullptr) {
    for (int64_t i = 0; i < whole; i += kLanes) {
      Lanes a, b;
      load_lanes(a, x + i);
      load_lanes(b, delta + i);
      store_lanes(sum + i, a + b);
    }
    for (int64_t i = whole; i < n; ++i) store_one(sum + i, float_of(x[i]) + float_of(delta[i]));
    x = sum;
  }
  Lanes squares = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    Lanes v;
    load_lanes(v, x + i);
    squares += v * v;
  }
  float total = sum_of(squares);
  for (int64_t i = whole; i < n; ++i) total += float_of(x[i]) * float_of(x[i]);
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < whole; i += kLanes) {
    Lanes v, w;
    load_lanes(v, x + i);
    load_lanes(w, weight + i);
    store_lanes(out + i, v * scale * w);
  }
  for (int64_t i = whole; i < n; ++i)
    store_one(out + i, float_of(x[i]) * scale * float_of(weight[i]));
}

CLONED void norm_bf16(const uint16_t* x, const uint16_t* delta, const uint16_t* weight, int64_t n,
                      float eps, uint16_t* sum, uint16_t* out) {
  norm_row(x, delta, weight, n, eps, sum, out);
}

CLONED void norm_float(const float* x, const float* delta, const float* weight, int64_t n,
                       float eps, float* sum, float* out) {
  norm_row(x, delta, weight, n, eps, sum, out);
}

template <class T>
LANES_INLINE void turn_half(const T* x, const T* other, const T* cos, const T* sin, int64_t n,
                            T* out) {
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Lanes a, b, c, s;
    load_lanes(a, x + i);
    load_lanes(b, other + i);
    load_lanes(c, cos + i);
    load_lanes(s, sin + i);
    store_lanes(out + i, a * c + b * s);
  }
  for (int64_t i = whole; i < n; ++i)
    store_one(out + i, float_of(x[i]) * float_of(cos[i]) + float_of(other[i]) * float_of(sin[i]));
}

// One head: the halves of its first n numbers are turned; `sin` is negative in its first half.
template <class T>
LANES_INLINE void turn_head(const T* x, const T* cos, const T* sin, int64_t n, T* out) {
  const int64_t half = n / 2;
  turn_half(x, x + half, cos, sin, half, out);
  turn_half(x + half, x, cos + half, sin + half, half, out + half);
}

CLONED void turn_bf16(const uint16_t* x, const uint16_t* cos, const uint16_t* sin, int64_t n,
                      uint16_t* out) {
  turn_head(x, cos, sin, n, out);
}

CLONED void turn_float(const float* x, const float* cos, const float* sin, int64_t n, float* out) {
  turn_head(x, cos, sin, n, out);
}

template <class T>
LANES_INLINE void gate_row(const T* x, int64_t n, T* out) {
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Lanes gate, up, s;
    load_lanes(gate, x + i);
    load_lanes(up, x + n + i);
    s = gate;
    sigmoid_lanes(s);
    store_lanes(out + i, gate * s * up);
  }
  for (int64_t i = whole; i < n; ++i) {
    const float gate = float_of(x[i]);
    store_one(out + i, gate / (1.0f + std::exp(-gate)) * float_of(x[n + i]));
  }
}

CLONED void gate_bf16(const uint16_t* x, int64_t n, uint16_t* out) { gate_row(x, n, out); }

CLONED void gate_float(const float* x, int64_t n, float* out) { gate_row(x, n, out); }

// A head, normed and turned with one rounding; x may be out.
CLONED void turn_normed(const uint16_t* x, const uint16_t* weight, float eps, const uint16_t* cos,
                        const uint16_t* sin, int64_t dim, int64_t turned, uint16_t* out) {
  float head[kMostHeadSize];
  Lanes squares = {};
  for (int64_t i = 0; i < dim; i += kLanes) {
    Lanes v;
    load_lanes(v, x + i);
    squares += v * v;
  }
  const float scale = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(dim) + eps);
  for (int64_t i = 0; i < dim; i += kLanes) {
    Lanes v, w;
    load_lanes(v, x + i);
    load_lanes(w, weight + i);
    store_lanes(head + i, v * scale * w);
  }
  const int64_t half = turned / 2;
  for (int64_t i = 0; i < turned; i += kLanes) {
    Lanes a, b, c, s;
    load_lanes(a, head + i);
    load_lanes(b, head + (i < half ? i + half : i - half));
    load_lanes(c, cos + i);
    load_lanes(s, sin + i);
    store_lanes(out + i, a * c + b * s);
  }
  for (int64_t i = turned; i < dim; i += kLanes) {
    Lanes v;
    load_lanes(v, head + i);
    store_lanes(out + i, v);
  }
}

CLONED void add_bf16(const uint16_t* x, int64_t n, uint16_t* out) {
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Lanes a, b;
    load_lanes(a, x + i);
    load_lanes(b, out + i);
    store_lanes(out + i, a + b);
  }
  for (int64_t i = whole; i < n; ++i) store_one(out + i, float_of(x[i]) + float_of(out[i]));
}

bool is_bf16(const Tensor& x, const char* what) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Float, what,
                  ": tensors must be bfloat16 or float32");
  return dtype == ScalarType::BFloat16;
}

bool has_rows(const Tensor& t, int64_t rows, int64_t columns, ScalarType dtype) {
  return t.dim() == 2 && t.size(0) == rows && t.size(1) == columns && t.is_contiguous() &&
         t.scalar_type() == dtype;
}

// x, delta, sum, out [T, N] contiguous, weight [N]; each `size` numbers of a row are normed alone.
void norm_rows(const Tensor& x, const std::optional<Tensor>& delta, const Tensor& weight,
               int64_t size, double eps, const std::optional<Tensor>& sum, Tensor& out) {
  const bool bf16 = is_bf16(x, "norm_rows");
  STD_TORCH_CHECK(x.dim() == 2, "norm_rows: x must be [T, N]");
  const int64_t rows = x.size(0), n = x.size(1);
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(x.is_contiguous() && has_rows(out, rows, n, dtype) && weight.dim() == 1 &&
                      weight.size(0) == n && weight.is_contiguous() &&
                      weight.scalar_type() == dtype && size > 0 && n % size == 0 &&
                      delta.has_value() == sum.has_value() &&
                      (!delta.has_value() ||
                       (has_rows(*delta, rows, n, dtype) && has_rows(*sum, rows, n, dtype))),
                  "norm_rows: x, delta, sum and out must be contiguous [T, N] of one dtype, weight "
                  "[N], and size a divisor of N");
  const char *in = static_cast<const char*>(x.data_ptr()),
             *add = delta.has_value() ? static_cast<const char*>(delta->data_ptr()) : nullptr,
             *w = static_cast<const char*>(weight.data_ptr());
  char *total = sum.has_value() ? static_cast<char*>(sum->data_ptr()) : nullptr,
       *to = static_cast<char*>(out.data_ptr());
  const int64_t element = bf16 ? 2 : 4, step = size * element, groups = n / size;
  const float e = static_cast<float>(eps);
  for (int64_t i = 0; i < rows * groups; ++i) {
    const char* own = w + i % groups * step;
    const char* d = add == nullptr ? nullptr : add + i * step;
    char* s = total == nullptr ? nullptr : total + i * step;
    if (bf16)
      norm_bf16(reinterpret_cast<const uint16_t*>(in + i * step),
                reinterpret_cast<const uint16_t*>(d), reinterpret_cast<const uint16_t*>(own), size,
                e, reinterpret_cast<uint16_t*>(s), reinterpret_cast<uint16_t*>(to + i * step));
    else
      norm_float(reinterpret_cast<const float*>(in + i * step), reinterpret_cast<const float*>(d),
                 reinterpret_cast<const float*>(own), size, e, reinterpret_cast<float*>(s),
                 reinterpret_cast<float*>(to + i * step));
  }
}

// x [T, heads, Dh], contiguous within a row; cos and sin [P, Dh]; positions int64 [T];
// out [T, heads, Dh].
void rotate_heads(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                  Tensor& out) {
  const bool bf16 = is_bf16(x, "rotate_heads");
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(x.dim() == 3 && cos.dim() == 2, "rotate_heads: x [T, heads, Dh], cos [P, Dh]");
  const int64_t rows = x.size(0), heads = x.size(1), dim = x.size(2), places = cos.size(0);
  STD_TORCH_CHECK(dim % 2 == 0 && x.stride(2) == 1 && x.stride(1) == dim && out.dim() == 3 &&
                      out.size(0) == rows && out.size(1) == heads && out.size(2) == dim &&
                      out.is_contiguous() && out.scalar_type() == dtype &&
                      has_rows(cos, places, dim, dtype) && has_rows(sin, places, dim, dtype) &&
                      positions.dim() == 1 && positions.size(0) == rows &&
                      positions.is_contiguous() && positions.scalar_type() == ScalarType::Long,
                  "rotate_heads: x [T, heads, Dh] contiguous within its rows, cos and sin [P, Dh], "
                  "positions int64 [T], out [T, heads, Dh]");
  const int64_t element = bf16 ? 2 : 4, stride = x.stride(0);
  const int64_t* at = static_cast<const int64_t*>(positions.data_ptr());
  const char *in = static_cast<const char*>(x.data_ptr()),
             *c = static_cast<const char*>(cos.data_ptr()),
             *s = static_cast<const char*>(sin.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  for (int64_t r = 0; r < rows; ++r) {
    STD_TORCH_CHECK(at[r] >= 0 && at[r] < places, "rotate_heads: position ", at[r],
                    " is outside the table of ", places);
    const int64_t place = at[r] * dim * element;
    for (int64_t h = 0; h < heads; ++h) {
      const char* from = in + (r * stride + h * dim) * element;
      char* head = to + (r * heads + h) * dim * element;
      if (bf16)
        turn_bf16(
            reinterpret_cast<const uint16_t*>(from), reinterpret_cast<const uint16_t*>(c + place),
            reinterpret_cast<const uint16_t*>(s + place), dim, reinterpret_cast<uint16_t*>(head));
      else
        turn_float(reinterpret_cast<const float*>(from), reinterpret_cast<const float*>(c + place),
                   reinterpret_cast<const float*>(s + place), dim, reinterpret_cast<float*>(head));
    }
  }
}

// x [T, 2I], gates before what they gate; out [T, I].
void gated_silu(const Tensor& x, Tensor& out) {
  const bool bf16 = is_bf16(x, "gated_silu");
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0 && x.is_contiguous() &&
                      has_rows(out, x.size(0), x.size(1) / 2, x.scalar_type()),
                  "gated_silu: x must be contiguous [T, 2I], out [T, I]");
  const int64_t rows = x.size(0), n = x.size(1) / 2;
  for (int64_t r = 0; r < rows; ++r) {
    if (bf16)
      gate_bf16(static_cast<const uint16_t*>(x.data_ptr()) + 2 * r * n, n,
                static_cast<uint16_t*>(out.data_ptr()) + r * n);
    else
      gate_float(static_cast<const float*>(x.data_ptr()) + 2 * r * n, n,
                 static_cast<float*>(out.data_ptr()) + r * n);
  }
}

}  // namespace

void norm_row_bf16(const uint16_t* x, const uint16_t* delta, const uint16_t* weight, int64_t n,
                   float eps, uint16_t* sum, uint16_t* out) {
  norm_bf16(x, delta, weight, n, eps, sum, out);
}

void gate_row_bf16(const uint16_t* x, int64_t n, uint16_t* out) { gate_bf16(x, n, out); }

void add_row_bf16(const uint16_t* x, int64_t n, uint16_t* out) { add_bf16(x, n, out); }

void norm_and_turn_head(const uint16_t* x, const uint16_t* weight, float eps, const uint16_t* cos,
                        const uint16_t* sin, int64_t dim, int64_t turned, uint16_t* out) {
  turn_normed(x, weight, eps, cos, sin, dim, turned, out);
}

STABLE_TORCH_LIBRARY_FRAGMENT(specplug, m) {
  m.def(
      "norm_rows(Tensor x, Tensor? delta, Tensor weight, int size, float eps, Tensor(a!)? sum, "
      "Tensor(b!) out) -> ()");
  m.def("rotate_heads(Tensor x, Tensor cos, Tensor sin, Tensor positions, Tensor(a!) out) -> ()");
  m.def("gated_silu(Tensor x, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specplug, CPU, m) {
  m.impl("norm_rows", TORCH_BOX(&norm_rows));
  m.impl("rotate_heads", TORCH_BOX(&rotate_heads));
  m.impl("gated_silu", TORCH_BOX(&gated_silu));
}

}  // namespace specplug
