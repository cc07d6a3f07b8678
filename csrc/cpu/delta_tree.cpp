// SPDX-License-Identifier: Apache-2.0
// Gated DeltaNet layers over trees; the equations are in kernels/src/delta_tree.py.
//
// The triangular system is solved row by row, and a row meets nobody but its ancestors. All else is
// products of matrices with sums in registers: with the committed state, which is read once per
// tree and head, and with the keys. Their operands are packed first: rows of one head lie a
// multiple of 4 KiB apart, which is the same few lines of a cache.
#include <algorithm>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "tensors.h"

namespace specplug {

namespace {

// Rows of K or Q that share one pass over the state, and lanes of V that are summed at once.
constexpr int kRows = 4;
constexpr int kPanel = 2;

// One tree and one value head. Row i of an operand lies at i * its stride.
struct Head {
  const float *query, *key, *value, *decays, *strengths;
  float *output, *updates;
  int64_t rows, key_stride, value_stride, head_stride;  // of rows; decays and strengths: the last
  int64_t key_size, value_size;
  const int64_t* parents;
  int64_t first;  // row of the tree's root, from which parents are counted
};

// out[i] = x[i] m for up to kRows rows and P * kLanes columns of m [depth, stride]; with `Keep`
// out[i] = kept * out[i] + x[i] m.
template <bool Keep, int P, class T, class O>
ALWAYS_INLINE void times_panel(const float* x, int64_t x_stride, int64_t rows, const T* m,
                               int64_t m_stride, int64_t depth, O* out, int64_t out_stride,
                               float kept) {
  Lanes sums[kRows][P] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Lanes s[P];
    for (int p = 0; p < P; ++p) s[p] = load_lanes(m + k * m_stride + p * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const float factor = x[std::min<int64_t>(r, rows - 1) * x_stride + k];
      for (int p = 0; p < P; ++p) sums[r][p] += factor * s[p];
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int p = 0; p < P; ++p) {
      O* to = out + r * out_stride + p * kLanes;
      if (Keep) {
        Lanes old = load_lanes(to);
        sums[r][p] += kept * old;
      }
      store_lanes(to, sums[r][p]);
    }
}

template <bool Keep = false, class T, class O>
ALWAYS_INLINE void times(const float* x, int64_t x_stride, int64_t rows, const T* m,
                         int64_t m_stride, int64_t depth, int64_t columns, O* out,
                         int64_t out_stride, float kept = 0.0f) {
  int64_t v = 0;
  while (v < columns) {
    const bool full = v + kPanel * kLanes <= columns;
    for (int64_t i = 0; i < rows; i += kRows) {
      const int64_t count = std::min<int64_t>(kRows, rows - i);
      const float* from = x + i * x_stride;
      O* to = out + i * out_stride + v;
      if (full)
        times_panel<Keep, kPanel>(from, x_stride, count, m + v, m_stride, depth, to, out_stride,
                                  kept);
      else
        times_panel<Keep, 1>(from, x_stride, count, m + v, m_stride, depth, to, out_stride, kept);
    }
    v += full ? kPanel * kLanes : kLanes;
  }
}

// What `solve` needs beside its operands.
struct Scratch {
  // Kᵀ [key_size, padded rows], U [rows, value_size], products of kRows rows with all keys before.
  std::vector<float> key_columns, updates, keys_dot, queries_dot;
  // Decays from the committed state down to each row.
  std::vector<float> entering;
  // A row's ancestors, its parent first, and the factors of their u in its u and o.
  std::vector<int64_t> above;
  std::vector<float> in_update, in_output;

  void resize(int64_t rows, int64_t key_size, int64_t value_size) {
    const int64_t padded = (rows + kLanes - 1) / kLanes * kLanes;
    key_columns.assign(key_size * padded, 0.0f);
    updates.resize(rows * value_size);
    keys_dot.resize(kRows * padded);
    queries_dot.resize(kRows * padded);
    entering.resize(rows);
    above.resize(rows);
    in_update.resize(rows);
    in_output.resize(rows);
  }
};

// u and o of P * kLanes columns of one row, whose products with the state stand in `update` and
// `o`.
template <int P>
ALWAYS_INLINE void finish_row(const Scratch& t, int64_t depth, const float* value, float* update,
                              float* o, const float* updates, int64_t value_size, float strength,
                              float entered, float own, float scale) {
  Lanes u[P], out[P];
  for (int p = 0; p < P; ++p) {
    Lanes x = load_lanes(value + p * kLanes), s = load_lanes(update + p * kLanes);
    out[p] = load_lanes(o + p * kLanes);
    u[p] = strength * (x - entered * s);
    out[p] *= entered;
  }
  for (int64_t d = 0; d < depth; ++d) {
    const float* from = updates + t.above[d] * value_size;
    for (int p = 0; p < P; ++p) {
      Lanes known = load_lanes(from + p * kLanes);
      u[p] -= t.in_update[d] * known;
      out[p] += t.in_output[d] * known;
    }
  }
  for (int p = 0; p < P; ++p) {
    store_lanes(update + p * kLanes, u[p]);
    store_lanes(o + p * kLanes, scale * (out[p] + own * u[p]));
  }
}

template <class T>
ALWAYS_INLINE void solve(const Head& h, const T* state, float scale, Scratch& t) {
  const int64_t value_size = h.value_size, padded = t.key_columns.size() / h.key_size;
  float* updates = t.updates.data();
  times(h.key, h.key_stride, h.rows, state, value_size, h.key_size, value_size, updates,
        value_size);
  times(h.query, h.key_stride, h.rows, state, value_size, h.key_size, value_size, h.output,
        h.value_stride);
  for (int64_t i = 0; i < h.rows; ++i)
    for (int64_t k = 0; k < h.key_size; ++k)
      t.key_columns[k * padded + i] = h.key[i * h.key_stride + k];
  for (int64_t first = 0; first < h.rows; first += kRows) {
    const int64_t count = std::min<int64_t>(kRows, h.rows - first);
    // A row meets only keys before it and its own.
    const int64_t columns = (first + count + kLanes - 1) / kLanes * kLanes;
    times(h.key + first * h.key_stride, h.key_stride, count, t.key_columns.data(), padded,
          h.key_size, columns, t.keys_dot.data(), padded);
    times(h.query + first * h.key_stride, h.key_stride, count, t.key_columns.data(), padded,
          h.key_size, columns, t.queries_dot.data(), padded);
    for (int64_t i = first; i < first + count; ++i) {
      const float* keys_dot = t.keys_dot.data() + (i - first) * padded;
      const float* queries_dot = t.queries_dot.data() + (i - first) * padded;
      const float decay = h.decays[i * h.head_stride], strength = h.strengths[i * h.head_stride];
      int64_t j = h.parents[i] < 0 ? -1 : h.parents[i] - h.first, depth = 0;
      const float entered = t.entering[i] = j < 0 ? decay : decay * t.entering[j];
      for (float product = decay; j >= 0; ++depth) {
        t.above[depth] = j;
        t.in_update[depth] = strength * product * keys_dot[j];
        t.in_output[depth] = product * queries_dot[j];
        product *= h.decays[j * h.head_stride];
        j = h.parents[j] < 0 ? -1 : h.parents[j] - h.first;
      }
      for (int64_t v = 0; v < value_size;) {
        const bool full = v + kPanel * kLanes <= value_size;
        const float* value = h.value + i * h.value_stride + v;
        float* update = updates + i * value_size + v;
        float* o = h.output + i * h.value_stride + v;
        if (full)
          finish_row<kPanel>(t, depth, value, update, o, updates + v, value_size, strength, entered,
                             queries_dot[i], scale);
        else
          finish_row<1>(t, depth, value, update, o, updates + v, value_size, strength, entered,
                        queries_dot[i], scale);
        v += full ? kPanel * kLanes : kLanes;
      }
      std::memcpy(h.updates + i * h.value_stride, updates + i * value_size,
                  value_size * sizeof(float));
    }
  }
}

CLONED void solve_float(const Head& h, const float* state, float scale, Scratch& t) {
  solve(h, state, scale, t);
}

CLONED void solve_bf16(const Head& h, const uint16_t* state, float scale, Scratch& t) {
  solve(h, state, scale, t);
}

// The path to a committed row: its keys, times the decays below each row, as [key_size, depth], its
// u [depth, value_size], and the decays of the whole path.
struct Path {
  std::vector<float> keys, updates;
  int64_t depth = 0;
  float entered = 1.0f;
};

template <class T>
ALWAYS_INLINE void commit(const Path& path, T* state, int64_t key_size, int64_t value_size) {
  times<true>(path.keys.data(), path.depth, key_size, path.updates.data(), value_size, path.depth,
              value_size, state, value_size, path.entered);
}

CLONED void commit_float(const Path& path, float* state, int64_t key_size, int64_t value_size) {
  commit(path, state, key_size, value_size);
}

CLONED void commit_bf16(const Path& path, uint16_t* state, int64_t key_size, int64_t value_size) {
  commit(path, state, key_size, value_size);
}

CLONED void convolve_row(const float* inputs, const int64_t* window, const float* weight,
                         const float* bias, bool silu, float* out, int64_t channels,
                         int64_t width) {
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes) {
    Lanes sum = {};
    if (bias != nullptr) sum = load_lanes(bias + c);
    for (int64_t w = 0; w < width; ++w)
      sum += load_lanes(inputs + window[w] * channels + c) * load_lanes(weight + w * channels + c);
    if (silu) sum *= sigmoid_lanes(sum);
    store_lanes(out + c, sum);
  }
  if (c == channels) return;
  // The last channels, a lane each.
  Lanes sum = {};
  for (int i = 0; c + i < channels; ++i) {
    sum[i] = bias == nullptr ? 0.0f : bias[c + i];
    for (int64_t w = 0; w < width; ++w)
      sum[i] += inputs[window[w] * channels + c + i] * weight[w * channels + c + i];
  }
  const Lanes gate = sigmoid_lanes(sum);
  for (int i = 0; c + i < channels; ++i) out[c + i] = silu ? sum[i] * gate[i] : sum[i];
}

struct Trees {
  const int64_t *starts, *parents, *slots;
  int64_t count, rows;
};

Trees describe_trees(const Tensor& starts, const Tensor& parents, const Tensor& slots,
                     const Tensor& states, const char* name) {
  const Trees t{data<int64_t>(starts), data<int64_t>(parents), data<int64_t>(slots), slots.numel(),
                parents.numel()};
  STD_TORCH_CHECK(is_tensor(starts, ScalarType::Long, {t.count + 1}) &&
                      is_tensor(parents, ScalarType::Long, {t.rows}) &&
                      is_tensor(slots, ScalarType::Long, {t.count}),
                  name, ": starts, parents and slots must be int64 [R + 1], [M] and [R]");
  STD_TORCH_CHECK(t.starts[0] == 0 && t.starts[t.count] == t.rows, name,
                  ": starts must begin with 0 and end with ", t.rows);
  for (int64_t r = 0; r < t.count; ++r) {
    STD_TORCH_CHECK(t.slots[r] >= 0 && t.slots[r] < states.size(0), name, ": slot ", t.slots[r],
                    " is outside ", states.size(0), " states");
    STD_TORCH_CHECK(t.starts[r] <= t.starts[r + 1] && t.starts[r + 1] <= t.rows, name,
                    ": starts must not descend");
    for (int64_t i = t.starts[r]; i < t.starts[r + 1]; ++i)
      STD_TORCH_CHECK(t.parents[i] == -1 || (t.parents[i] >= t.starts[r] && t.parents[i] < i), name,
                      ": row ", i, " has parent ", t.parents[i],
                      "; a parent is -1 or an earlier row of the tree");
  }
  return t;
}

bool is_bf16_states(const Tensor& states, const char* name) {
  const bool bf16 = states.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(states.dim() == 4 && (bf16 || states.scalar_type() == ScalarType::Float) &&
                      states.size(3) % kLanes == 0 && states.stride(3) == 1 &&
                      states.stride(2) == states.size(3) &&
                      states.stride(1) == states.size(2) * states.size(3),
                  name, ": states must be float32 or bfloat16 [S, Hv, K, V] with contiguous ",
                  "states and V a multiple of ", kLanes);
  return bf16;
}

}  // namespace

void tree_conv(const Tensor& inputs, const Tensor& windows, const Tensor& weight,
               const std::optional<Tensor>& bias, bool silu, Tensor& out) {
  STD_TORCH_CHECK(inputs.dim() == 2 && windows.dim() == 2,
                  "tree_conv: inputs and windows must be [I, C] and [M, W]");
  const int64_t count = inputs.size(0), channels = inputs.size(1);
  const int64_t rows = windows.size(0), width = windows.size(1);
  STD_TORCH_CHECK(is_tensor(inputs, ScalarType::Float, {count, channels}) &&
                      is_tensor(windows, ScalarType::Long, {rows, width}) &&
                      is_tensor(weight, ScalarType::Float, {width, channels}) &&
                      (!bias || is_tensor(*bias, ScalarType::Float, {channels})) &&
                      is_tensor(out, ScalarType::Float, {rows, channels}),
                  "tree_conv: needs contiguous float32 inputs [I, C], weight [W, C], bias [C], "
                  "out [M, C] and int64 windows [M, W]");
  const int64_t* window = data<int64_t>(windows);
  for (int64_t i = 0; i < rows * width; ++i)
    STD_TORCH_CHECK(window[i] >= 0 && window[i] < count, "tree_conv: window entry ", window[i],
                    " is outside ", count, " inputs");
  const float* offset = bias ? data<float>(*bias) : nullptr;
  torch::stable::parallel_for(0, rows, 1 + 4096 / (channels + 1), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      convolve_row(data<float>(inputs), window + m * width, data<float>(weight), offset, silu,
                   data<float>(out) + m * channels, channels, width);
  });
}

void tree_delta_rule(const Tensor& query, const Tensor& key, const Tensor& value,
                     const Tensor& decays, const Tensor& strengths, const Tensor& states,
                     const Tensor& starts, const Tensor& parents, const Tensor& slots, double scale,
                     Tensor& output, Tensor& updates) {
  const bool bf16 = is_bf16_states(states, "tree_delta_rule");
  const Trees trees = describe_trees(starts, parents, slots, states, "tree_delta_rule");
  const int64_t heads = states.size(1), key_size = states.size(2), value_size = states.size(3);
  STD_TORCH_CHECK(key.dim() == 3 && key.size(1) > 0 && heads % key.size(1) == 0,
                  "tree_delta_rule: ", heads, " value heads are no multiple of the key heads");
  const int64_t key_heads = key.size(1), group = heads / key_heads;
  const auto float_rows = [&](const Tensor& t, int64_t size) {
    return is_tensor(t, ScalarType::Float, {trees.rows, heads, size});
  };
  STD_TORCH_CHECK(is_tensor(query, ScalarType::Float, {trees.rows, key_heads, key_size}) &&
                      is_tensor(key, ScalarType::Float, {trees.rows, key_heads, key_size}) &&
                      float_rows(value, value_size) && float_rows(output, value_size) &&
                      float_rows(updates, value_size) &&
                      is_tensor(decays, ScalarType::Float, {trees.rows, heads}) &&
                      is_tensor(strengths, ScalarType::Float, {trees.rows, heads}),
                  "tree_delta_rule: needs contiguous float32 query and key [M, Hk, K], value, "
                  "output and updates [M, Hv, V], decays and strengths [M, Hv]");
  torch::stable::parallel_for(0, trees.count * heads, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / heads, head = i % heads, first = trees.starts[r];
      const int64_t rows = trees.starts[r + 1] - first;
      if (rows == 0) continue;
      scratch.resize(rows, key_size, value_size);
      const int64_t key_at = (first * key_heads + head / group) * key_size;
      const int64_t value_at = (first * heads + head) * value_size;
      const Head h{data<float>(query) + key_at,
                   data<float>(key) + key_at,
                   data<float>(value) + value_at,
                   data<float>(decays) + first * heads + head,
                   data<float>(strengths) + first * heads + head,
                   data<float>(output) + value_at,
                   data<float>(updates) + value_at,
                   rows,
                   key_heads * key_size,
                   heads * value_size,
                   heads,
                   key_size,
                   value_size,
                   trees.parents + first,
                   first};
      const int64_t state_at = trees.slots[r] * states.stride(0) + head * states.stride(1);
      if (bf16)
        solve_bf16(h, data<uint16_t>(states) + state_at, static_cast<float>(scale), scratch);
      else
        solve_float(h, data<float>(states) + state_at, static_cast<float>(scale), scratch);
    }
  });
}

void commit_states(Tensor& states, const Tensor& keys, const Tensor& updates, const Tensor& decays,
                   const Tensor& starts, const Tensor& parents, const Tensor& slots,
                   const Tensor& last_rows) {
  const bool bf16 = is_bf16_states(states, "commit_states");
  const Trees trees = describe_trees(starts, parents, slots, states, "commit_states");
  const int64_t heads = states.size(1), key_size = states.size(2), value_size = states.size(3);
  STD_TORCH_CHECK(keys.dim() == 3 && keys.size(1) > 0 && heads % keys.size(1) == 0,
                  "commit_states: ", heads, " value heads are no multiple of the key heads");
  const int64_t key_heads = keys.size(1), group = heads / key_heads;
  STD_TORCH_CHECK(is_tensor(keys, ScalarType::Float, {trees.rows, key_heads, key_size}) &&
                      is_tensor(updates, ScalarType::Float, {trees.rows, heads, value_size}) &&
                      is_tensor(decays, ScalarType::Float, {trees.rows, heads}) &&
                      is_tensor(last_rows, ScalarType::Long, {trees.count}),
                  "commit_states: needs contiguous float32 keys [M, Hk, K], updates [M, Hv, V], "
                  "decays [M, Hv] and int64 last_rows [R]");
  const int64_t* last = data<int64_t>(last_rows);
  for (int64_t r = 0; r < trees.count; ++r)
    STD_TORCH_CHECK(last[r] >= trees.starts[r] && last[r] < trees.starts[r + 1],
                    "commit_states: row ", last[r], " is not of tree ", r);
  torch::stable::parallel_for(0, trees.count * heads, 1, [&](int64_t begin, int64_t end) {
    Path path;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / heads, head = i % heads;
      path.depth = 0;
      for (int64_t row = last[r]; row >= 0; row = trees.parents[row]) ++path.depth;
      path.keys.resize(key_size * path.depth);
      path.updates.resize(path.depth * value_size);
      path.entered = 1.0f;
      int64_t j = 0;
      for (int64_t row = last[r]; row >= 0; row = trees.parents[row], ++j) {
        const float* key = data<float>(keys) + (row * key_heads + head / group) * key_size;
        for (int64_t k = 0; k < key_size; ++k)
          path.keys[k * path.depth + j] = path.entered * key[k];
        std::memcpy(path.updates.data() + j * value_size,
                    data<float>(updates) + (row * heads + head) * value_size,
                    value_size * sizeof(float));
        path.entered *= data<float>(decays)[row * heads + head];
      }
      const int64_t at = trees.slots[r] * states.stride(0) + head * states.stride(1);
      if (bf16)
        commit_bf16(path, data<uint16_t>(states) + at, key_size, value_size);
      else
        commit_float(path, data<float>(states) + at, key_size, value_size);
    }
  });
}

OPERATOR(CPU, tree_conv,
         "(Tensor inputs, Tensor windows, Tensor weight, Tensor? bias, bool silu, Tensor(a!) out) "
         "-> ()")
OPERATOR(CPU, tree_delta_rule,
         "(Tensor query, Tensor key, Tensor value, Tensor decays, Tensor strengths, Tensor states, "
         "Tensor starts, Tensor parents, Tensor slots, float scale, Tensor(a!) output, Tensor(b!) "
         "updates) -> ()")
OPERATOR(CPU, commit_states,
         "(Tensor(a!) states, Tensor keys, Tensor updates, Tensor decays, Tensor starts, Tensor "
         "parents, Tensor slots, Tensor last_rows) -> ()")

}  // namespace specplug
