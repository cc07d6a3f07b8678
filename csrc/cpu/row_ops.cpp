// SPDX-License-Identifier: Apache-2.0
// What lies between the matrix products of a draft layer, on a handful of rows: norms, rotary
// embeddings, gates. Composed of torch's operators the norms alone take an eighth of a small head's
// draft.
#include <cmath>

#include "lanes.h"
#include "row_ops.h"
#include "tensors.h"

namespace specplug {

namespace {

ALWAYS_INLINE void store_one(float* p, float x) { *p = x; }

ALWAYS_INLINE void store_one(uint16_t* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  *p = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// sum = x + delta, in the numbers' own format; out = sum / rms(sum) * weight over n numbers.
// Without delta, sum is x.
template <class T>
ALWAYS_INLINE void norm_numbers(const T* x, const T* delta, const T* weight, int64_t n, float eps,
                                T* sum, T* out) {
  const int64_t whole = n / kLanes * kLanes;
  if (delta != nullptr) {
    for (int64_t i = 0; i < whole; i += kLanes)
      store_lanes(sum + i, load_lanes(x + i) + load_lanes(delta + i));
    for (int64_t i = whole; i < n; ++i) store_one(sum + i, value_of(x[i]) + value_of(delta[i]));
    x = sum;
  }
  Lanes squares = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Lanes v = load_lanes(x + i);
    squares += v * v;
  }
  float total = sum_of(squares);
  for (int64_t i = whole; i < n; ++i) total += value_of(x[i]) * value_of(x[i]);
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < whole; i += kLanes)
    store_lanes(out + i, load_lanes(x + i) * scale * load_lanes(weight + i));
  for (int64_t i = whole; i < n; ++i)
    store_one(out + i, value_of(x[i]) * scale * value_of(weight[i]));
}

template <class T>
ALWAYS_INLINE void turn_half(const T* x, const T* other, const T* cos, const T* sin, int64_t n,
                             T* out) {
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    store_lanes(out + i, load_lanes(x + i) * load_lanes(cos + i) +
                             load_lanes(other + i) * load_lanes(sin + i));
  for (int64_t i = whole; i < n; ++i)
    store_one(out + i, value_of(x[i]) * value_of(cos[i]) + value_of(other[i]) * value_of(sin[i]));
}

// One head: the halves of its first n numbers are turned; `sin` is negative in its first half.
template <class T>
ALWAYS_INLINE void turn_head(const T* x, const T* cos, const T* sin, int64_t n, T* out) {
  const int64_t half = n / 2;
  turn_half(x, x + half, cos, sin, half, out);
  turn_half(x + half, x, cos + half, sin + half, half, out + half);
}

CLONED void turn(const uint16_t* x, const uint16_t* cos, const uint16_t* sin, int64_t n,
                 uint16_t* out) {
  turn_head(x, cos, sin, n, out);
}

CLONED void turn(const float* x, const float* cos, const float* sin, int64_t n, float* out) {
  turn_head(x, cos, sin, n, out);
}

template <class T>
ALWAYS_INLINE void gate_numbers(const T* x, int64_t n, T* out) {
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Lanes gate = load_lanes(x + i), up = load_lanes(x + n + i);
    store_lanes(out + i, gate * sigmoid_lanes(gate) * up);
  }
  for (int64_t i = whole; i < n; ++i) {
    const float gate = value_of(x[i]);
    store_one(out + i, gate / (1.0f + std::exp(-gate)) * value_of(x[n + i]));
  }
}

CLONED void norm(const uint16_t* x, const uint16_t* delta, const uint16_t* weight, int64_t n,
                 float eps, uint16_t* sum, uint16_t* out) {
  norm_numbers(x, delta, weight, n, eps, sum, out);
}

CLONED void norm(const float* x, const float* delta, const float* weight, int64_t n, float eps,
                 float* sum, float* out) {
  norm_numbers(x, delta, weight, n, eps, sum, out);
}

CLONED void gate(const uint16_t* x, int64_t n, uint16_t* out) { gate_numbers(x, n, out); }

CLONED void gate(const float* x, int64_t n, float* out) { gate_numbers(x, n, out); }

CLONED void turn_normed(const uint16_t* x, const uint16_t* weight, float eps, const uint16_t* cos,
                        const uint16_t* sin, int64_t dim, int64_t turned, uint16_t* out) {
  float head[kMostHeadSize];
  Lanes squares = {};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Lanes v = load_lanes(x + i);
    squares += v * v;
  }
  const float scale = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(dim) + eps);
  for (int64_t i = 0; i < dim; i += kLanes)
    store_lanes(head + i, load_lanes(x + i) * scale * load_lanes(weight + i));
  const int64_t half = turned / 2;
  for (int64_t i = 0; i < turned; i += kLanes) {
    const float* const other = head + (i < half ? i + half : i - half);
    store_lanes(out + i, load_lanes(head + i) * load_lanes(cos + i) +
                             load_lanes(other) * load_lanes(sin + i));
  }
  for (int64_t i = turned; i < dim; i += kLanes) store_lanes(out + i, load_lanes(head + i));
}

CLONED void add(const uint16_t* x, int64_t n, uint16_t* out) {
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    store_lanes(out + i, load_lanes(x + i) + load_lanes(out + i));
  for (int64_t i = whole; i < n; ++i) store_one(out + i, value_of(x[i]) + value_of(out[i]));
}

// Calls `run` with a value of x's element type.
template <class Run>
void with_numbers_of(const Tensor& x, const Run& run) {
  const bool bf16 = x.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(bf16 || x.scalar_type() == ScalarType::Float,
                  "row ops: tensors must be bfloat16 or float32");
  if (bf16)
    run(uint16_t{});
  else
    run(float{});
}

// x, delta, sum, out [T, N] contiguous, weight [N]; each `size` numbers of a row are normed alone.
void norm_rows(const Tensor& x, const std::optional<Tensor>& delta, const Tensor& weight,
               int64_t size, double eps, const std::optional<Tensor>& sum, Tensor& out) {
  STD_TORCH_CHECK(x.dim() == 2, "norm_rows: x must be [T, N]");
  const int64_t rows = x.size(0), n = x.size(1);
  const ScalarType dtype = x.scalar_type();
  const auto has_rows = [&](const Tensor& t) { return is_tensor(t, dtype, {rows, n}); };
  STD_TORCH_CHECK(has_rows(x) && has_rows(out) && is_tensor(weight, dtype, {n}) && size > 0 &&
                      n % size == 0 && delta.has_value() == sum.has_value() &&
                      (!delta.has_value() || (has_rows(*delta) && has_rows(*sum))),
                  "norm_rows: x, delta, sum and out must be contiguous [T, N] of one dtype, weight "
                  "[N], and size a divisor of N");
  with_numbers_of(x, [&](auto number) {
    using T = decltype(number);
    const T *in = data<T>(x), *add = data<T>(delta), *w = data<T>(weight);
    T *total = data<T>(sum), *to = data<T>(out);
    for (int64_t at = 0; at < rows * n; at += size)
      norm(in + at, add == nullptr ? nullptr : add + at, w + at % n, size, static_cast<float>(eps),
           total == nullptr ? nullptr : total + at, to + at);
  });
}

// x [T, heads, Dh], contiguous within a row; cos and sin [P, Dh]; positions int64 [T];
// out [T, heads, Dh].
void rotate_heads(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                  Tensor& out) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(x.dim() == 3 && cos.dim() == 2, "rotate_heads: x [T, heads, Dh], cos [P, Dh]");
  const int64_t rows = x.size(0), heads = x.size(1), dim = x.size(2), places = cos.size(0);
  STD_TORCH_CHECK(
      dim % 2 == 0 && x.stride(2) == 1 && x.stride(1) == dim &&
          is_tensor(out, dtype, {rows, heads, dim}) && is_tensor(cos, dtype, {places, dim}) &&
          is_tensor(sin, dtype, {places, dim}) && is_tensor(positions, ScalarType::Long, {rows}),
      "rotate_heads: x [T, heads, Dh] contiguous within its rows, cos and sin [P, Dh], "
      "positions int64 [T], out [T, heads, Dh]");
  const int64_t* at = data<int64_t>(positions);
  const int64_t stride = x.stride(0);
  with_numbers_of(x, [&](auto number) {
    using T = decltype(number);
    const T* in = data<T>(x);
    T* to = data<T>(out);
    for (int64_t r = 0; r < rows; ++r) {
      STD_TORCH_CHECK(at[r] >= 0 && at[r] < places, "rotate_heads: position ", at[r],
                      " is outside the table of ", places);
      const T *c = data<T>(cos) + at[r] * dim, *s = data<T>(sin) + at[r] * dim;
      for (int64_t h = 0; h < heads; ++h)
        turn(in + r * stride + h * dim, c, s, dim, to + (r * heads + h) * dim);
    }
  });
}

// x [T, 2I], gates before what they gate; out [T, I].
void gated_silu(const Tensor& x, Tensor& out) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0 && x.is_contiguous() &&
                      is_tensor(out, x.scalar_type(), {x.size(0), x.size(1) / 2}),
                  "gated_silu: x must be contiguous [T, 2I], out [T, I]");
  const int64_t rows = x.size(0), n = x.size(1) / 2;
  with_numbers_of(x, [&](auto number) {
    using T = decltype(number);
    for (int64_t r = 0; r < rows; ++r) gate(data<T>(x) + 2 * r * n, n, data<T>(out) + r * n);
  });
}

}  // namespace

void norm_row(const uint16_t* x, const uint16_t* delta, const uint16_t* weight, int64_t n,
              float eps, uint16_t* sum, uint16_t* out) {
  norm(x, delta, weight, n, eps, sum, out);
}

void gate_row(const uint16_t* x, int64_t n, uint16_t* out) { gate(x, n, out); }

void add_row(const uint16_t* x, int64_t n, uint16_t* out) { add(x, n, out); }

void norm_and_turn_head(const uint16_t* x, const uint16_t* weight, float eps, const uint16_t* cos,
                        const uint16_t* sin, int64_t dim, int64_t turned, uint16_t* out) {
  turn_normed(x, weight, eps, cos, sin, dim, turned, out);
}

OPERATOR(CPU, norm_rows,
         "(Tensor x, Tensor? delta, Tensor weight, int size, float eps, Tensor(a!)? sum, "
         "Tensor(b!) out) -> ()")
OPERATOR(CPU, rotate_heads,
         "(Tensor x, Tensor cos, Tensor sin, Tensor positions, Tensor(a!) out) -> ()")
OPERATOR(CPU, gated_silu, "(Tensor x, Tensor(a!) out) -> ()")

}  // namespace specplug
