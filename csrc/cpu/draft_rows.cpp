// SPDX-License-Identifier: Apache-2.0
// The parts of a draft layer on both sides of its attention, each in one call: on a handful of rows
// the operators between the products take as long as the products, as they find neither their code
// nor their data in the caches that the target's forward has just filled with weights.
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "packed_linear.h"
#include "row_ops.h"
#include "tensors.h"

namespace specplug {

namespace {

constexpr int64_t kLanesOfHead = 16;

bool is_bf16(const Tensor& t, std::initializer_list<int64_t> sizes) {
  return is_tensor(t, ScalarType::BFloat16, sizes);
}

// A weight [N, K] with its sums and scales, and perhaps a bias.
Int8Product product_of(const std::vector<Tensor>& parts, int64_t columns, int64_t depth) {
  STD_TORCH_CHECK(parts.size() == 3 || parts.size() == 4,
                  "draft rows: a product is a packed weight, its sums, its scales and perhaps a "
                  "bias");
  const std::optional<Tensor> bias =
      parts.size() == 4 ? std::optional<Tensor>(parts[3]) : std::nullopt;
  return int8_product(parts[0], parts[1], parts[2], bias, columns, depth);
}

using Rows = std::unique_ptr<uint16_t[]>;

Rows make_rows(int64_t rows, int64_t columns) {
  return Rows(new uint16_t[static_cast<size_t>(rows * columns)]);
}

void norm_all(const uint16_t* x, const uint16_t* weight, int64_t rows, int64_t n, float eps,
              uint16_t* out) {
  for_rows(rows,
           [&](int64_t r) { norm_row(x + r * n, nullptr, weight, n, eps, nullptr, out + r * n); });
}

// Angles of the positions of some rows.
struct Rotary {
  const uint16_t *cos, *sin;
  const int64_t* positions;
  int64_t turned;

  void apply(const uint16_t* x, const uint16_t* weight, float eps, int64_t row, int64_t dim,
             uint16_t* out) const {
    const int64_t at = positions[row] * turned;
    norm_and_turn_head(x, weight, eps, cos + at, sin + at, dim, turned, out);
  }
};

Rotary rotary_of(const Tensor& cos, const Tensor& sin, const Tensor& positions, int64_t rows,
                 int64_t dim) {
  STD_TORCH_CHECK(cos.dim() == 2 && is_bf16(cos, {cos.size(0), cos.size(1)}) &&
                      is_bf16(sin, {cos.size(0), cos.size(1)}) &&
                      is_tensor(positions, ScalarType::Long, {rows}),
                  "draft rows: cos and sin must be bfloat16 [P, turned], positions int64 [T]");
  const int64_t turned = cos.size(1), places = cos.size(0);
  STD_TORCH_CHECK(dim % kLanesOfHead == 0 && dim <= kMostHeadSize && turned <= dim &&
                      turned % (2 * kLanesOfHead) == 0,
                  "draft rows: heads of ", dim, " with ", turned, " turned");
  const int64_t* at = data<int64_t>(positions);
  for (int64_t r = 0; r < rows; ++r)
    STD_TORCH_CHECK(at[r] >= 0 && at[r] < places, "draft rows: position ", at[r],
                    " is outside the table of ", places);
  return {data<uint16_t>(cos), data<uint16_t>(sin), at, turned};
}

// out [T, heads, Dh] = norm(x [T, H]) times a weight [heads * Dh, H]; the first heads, as many as
// `head_norms` [normed, Dh] has rows, are normed and turned.
void project_heads(const Tensor& x, const Tensor& norm, const std::vector<Tensor>& weight,
                   const Tensor& head_norms, const Tensor& cos, const Tensor& sin,
                   const Tensor& positions, double eps, Tensor& out) {
  STD_TORCH_CHECK(x.dim() == 2 && out.dim() == 3 && head_norms.dim() == 2,
                  "project_heads: x [T, H], out [T, heads, Dh], head_norms [normed, Dh]");
  const int64_t rows = x.size(0), hidden = x.size(1), heads = out.size(1), dim = out.size(2);
  const int64_t normed = head_norms.size(0);
  STD_TORCH_CHECK(is_bf16(x, {rows, hidden}) && is_bf16(norm, {hidden}) &&
                      is_bf16(head_norms, {normed, dim}) && normed <= heads &&
                      is_bf16(out, {rows, heads, dim}),
                  "project_heads: x, norm, head_norms and out must be contiguous bfloat16");
  const Int8Product product = product_of(weight, heads * dim, hidden);
  const Rotary rotary = rotary_of(cos, sin, positions, rows, dim);
  const float e = static_cast<float>(eps);
  const Rows input = make_rows(rows, hidden);
  norm_all(data<uint16_t>(x), data<uint16_t>(norm), rows, hidden, e, input.get());
  multiply_int8(product, input.get(), rows, hidden, data<uint16_t>(out));
  for_rows(rows, [&](int64_t r) {
    for (int64_t h = 0; h < normed; ++h) {
      uint16_t* head = data<uint16_t>(out) + (r * heads + h) * dim;
      rotary.apply(head, data<uint16_t>(head_norms) + h * dim, e, r, dim, head);
    }
  });
}

// x [T, H] plus the output product of mixed [T, W], plus the gated MLP of the sum's norm.
void finish_layer(Tensor& x, const Tensor& mixed, const std::vector<Tensor>& output,
                  const Tensor& norm, const std::vector<Tensor>& gate_up,
                  const std::vector<Tensor>& down, int64_t intermediate, double eps) {
  STD_TORCH_CHECK(x.dim() == 2 && mixed.dim() == 2, "finish_layer: x [T, H], mixed [T, W]");
  const int64_t rows = x.size(0), hidden = x.size(1), width = mixed.size(1);
  STD_TORCH_CHECK(is_bf16(x, {rows, hidden}) && is_bf16(mixed, {rows, width}) &&
                      is_bf16(norm, {hidden}) && intermediate > 0,
                  "finish_layer: x, mixed and norm must be contiguous bfloat16");
  const Int8Product first = product_of(output, hidden, width);
  const Int8Product second = product_of(gate_up, 2 * intermediate, hidden);
  const Int8Product third = product_of(down, hidden, intermediate);
  const float e = static_cast<float>(eps);
  const Rows delta = make_rows(rows, hidden), normed = make_rows(rows, hidden),
             gates = make_rows(rows, 2 * intermediate), gated = make_rows(rows, intermediate);
  multiply_int8(first, data<uint16_t>(mixed), rows, width, delta.get());
  for_rows(rows, [&](int64_t r) {
    const int64_t at = r * hidden;
    norm_row(data<uint16_t>(x) + at, delta.get() + at, data<uint16_t>(norm), hidden, e,
             data<uint16_t>(x) + at, normed.get() + at);
  });
  multiply_int8(second, normed.get(), rows, hidden, gates.get());
  for_rows(rows, [&](int64_t r) {
    gate_row(gates.get() + 2 * r * intermediate, intermediate, gated.get() + r * intermediate);
  });
  multiply_int8(third, gated.get(), rows, intermediate, delta.get());
  for_rows(rows, [&](int64_t r) {
    add_row(delta.get() + r * hidden, hidden, data<uint16_t>(x) + r * hidden);
  });
}

// Keys, normed and turned, and values [L, M, Hkv, Dh] of all layers, of committed tokens whose
// target states are aux [M, F]: a product, a norm, and one product for all layers.
void context_heads(const Tensor& aux, const std::vector<Tensor>& join, const Tensor& norm,
                   const std::vector<Tensor>& weight, const Tensor& key_norms, const Tensor& cos,
                   const Tensor& sin, const Tensor& positions, double eps, Tensor& keys,
                   Tensor& values) {
  STD_TORCH_CHECK(aux.dim() == 2 && norm.dim() == 1 && keys.dim() == 4,
                  "context_heads: aux [M, F], norm [H], keys [L, M, Hkv, Dh]");
  const int64_t rows = aux.size(0), features = aux.size(1), hidden = norm.size(0);
  const int64_t layers = keys.size(0), heads = keys.size(2), dim = keys.size(3);
  STD_TORCH_CHECK(is_bf16(aux, {rows, features}) && is_bf16(norm, {hidden}) &&
                      is_bf16(key_norms, {layers, dim}) &&
                      is_bf16(keys, {layers, rows, heads, dim}) &&
                      is_bf16(values, {layers, rows, heads, dim}),
                  "context_heads: aux, norm, key_norms [L, Dh], keys and values must be contiguous "
                  "bfloat16");
  const int64_t of_layer = heads * dim, of_row = 2 * layers * of_layer;
  const Int8Product first = product_of(join, hidden, features);
  const Int8Product second = product_of(weight, of_row, hidden);
  const Rotary rotary = rotary_of(cos, sin, positions, rows, dim);
  const float e = static_cast<float>(eps);
  const Rows joined = make_rows(rows, hidden), projected = make_rows(rows, of_row);
  multiply_int8(first, data<uint16_t>(aux), rows, features, joined.get());
  norm_all(joined.get(), data<uint16_t>(norm), rows, hidden, e, joined.get());
  multiply_int8(second, joined.get(), rows, hidden, projected.get());
  for_rows(rows, [&](int64_t r) {
    const uint16_t* key = projected.get() + r * of_row;
    const uint16_t* value = key + layers * of_layer;
    for (int64_t l = 0; l < layers; ++l, key += of_layer, value += of_layer) {
      const int64_t to = (l * rows + r) * of_layer;
      for (int64_t h = 0; h < heads; ++h)
        rotary.apply(key + h * dim, data<uint16_t>(key_norms) + l * dim, e, r, dim,
                     data<uint16_t>(keys) + to + h * dim);
      std::memcpy(data<uint16_t>(values) + to, value, static_cast<size_t>(of_layer) * 2);
    }
  });
}

}  // namespace

OPERATOR(CPU, project_heads,
         "(Tensor x, Tensor norm, Tensor[] weight, Tensor head_norms, Tensor cos, Tensor sin, "
         "Tensor positions, float eps, Tensor(a!) out) -> ()")
OPERATOR(CPU, finish_layer,
         "(Tensor(a!) x, Tensor mixed, Tensor[] output, Tensor norm, Tensor[] gate_up, Tensor[] "
         "down, int intermediate, float eps) -> ()")
OPERATOR(CPU, context_heads,
         "(Tensor aux, Tensor[] join, Tensor norm, Tensor[] weight, Tensor key_norms, Tensor cos, "
         "Tensor sin, Tensor positions, float eps, Tensor(a!) keys, Tensor(b!) values) -> ()")

}  // namespace specplug
