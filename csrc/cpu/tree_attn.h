// SPDX-License-Identifier: Apache-2.0
// Shared types of the CPU tree attention: what one instruction-set variant must provide.
#pragma once

#include <cstdint>

#include "element.h"

namespace specplug {

// KV slots are processed in groups of 32, each made of two panels of 16 tokens.
constexpr int kPanel = 16;
constexpr int kGroup = 32;
// Rows handed to a variant at once; two AMX tiles high.
constexpr int kRowBlock = 32;
// Groups of one tile: the scores of a row block stay in the first two cache levels.
constexpr int kTileGroups = 8;
constexpr int kMaxHeadSize = 1024;
// Reference exponent of a row that has seen no score yet.
constexpr float kNoScore = -1e30f;

enum class LayoutKind : int { kVec = 0, kVnni = 1, kTable = 2 };

// Where the K and V of 32 consecutive slots of one KV head lie, in bytes.
// A "word" is 32 bits: one fp32, or a pair of bf16 along the summed dimension.
struct KvGroup {
  const char* k;    // panel 0: words of head dim 0, 16 tokens
  int64_t k_panel;  // to the next 16 tokens
  int64_t k_row;    // to the next word of the head dimension
  const char* v;    // panel 0: words of token 0, 16 head dims
  int64_t v_panel;  // to the next 16 head dims
  int64_t v_row;    // to the next word of tokens
  int valid;        // slots that exist; only read by `vec_values`
};

// 16 slots to be copied into a packed group.
struct PackSource {
  enum Kind : int { kVec, kTable, kDense } kind;
  const void* k;
  const void* v;
  int first;         // token offset inside the block (kVec, kTable)
  int valid;         // slots that exist; the rest become zeros
  int block_size;    // kVec
  int64_t k_stride;  // kDense: elements from token to token
  int64_t v_stride;
  const int32_t* k_table;  // kTable: [block_size, head_size] element offsets
  const int32_t* v_table;
};

// What rows have of a share of their slots: an unnormalised output with its softmax state.
struct Partial {
  float* m;  // [rows] reference exponent (log2 domain)
  float* l;  // [rows] sum of weights; 0 where nothing was attended
  float* o;  // [rows, head_size]
};

struct RowTarget {
  void* base;           // output of query row 0, first query head of the KV head
  int64_t row_stride;   // elements between query rows
  int64_t head_stride;  // elements between query heads
  int group_size;       // query heads per KV head
  Element element;
  float factor;  // of every value
};

struct AttnVariant {
  const char* name;
  bool bf16_dot;  // operands are bf16 pairs; otherwise fp32

  // Called by a worker before and after it runs the functions below.
  void (*begin)();
  void (*end)();

  // s[rows, 32*groups] = q[rows, words] . K; ld in elements of 4 bytes.
  void (*scores)(const uint32_t* q, int64_t ld_q, int rows, int words, const KvGroup* groups,
                 int num_groups, float* s, int64_t ld_s);
  // Scaled scores s * scale, bent to cap * tanh(s * scale / cap) where cap > 0.
  void (*reshape)(float* s, int64_t ld_s, int rows, int cols, float scale, float cap);
  // Columns of one group whose bit is clear become -inf. bits[rows].
  void (*mask)(float* s, int64_t ld_s, int rows, const uint32_t* bits);
  // Online softmax of s into p (same operand type as the variant), updating m, l and scaling o.
  void (*softmax)(float* s, int64_t ld_s, int rows, int cols, float scale_log2, bool first,
                  float* m, float* l, float* o, int head_size, uint32_t* p, int64_t ld_p);
  // o[rows, head_size] (+)= p . V
  void (*values)(const uint32_t* p, int64_t ld_p, int rows, const KvGroup* groups, int num_groups,
                 int head_size, bool first, float* o);
  // The same products over bf16 as vLLM's vec layout has it, K [dims][tokens] and V [tokens][dims]:
  // k_row is from dim to dim, v_row from token to token, and there are no panels. Null where words
  // have to be packed first.
  // Memory is asked for ahead of use: the groups' values where `asks`, and the keys of `next`, of
  // which `k` and `k_row` alone are read.
  void (*vec_scores)(const uint32_t* q, int64_t ld_q, int rows, int words, const KvGroup* groups,
                     int num_groups, float* s, int64_t ld_s, bool asks);
  void (*vec_values)(const uint32_t* p, int64_t ld_p, int rows, const KvGroup* groups,
                     int num_groups, int head_size, bool first, float* o, const KvGroup* next,
                     int num_next);
  // o[head_size] += p . V of one row whose values lie anywhere: `count` slots from an even column
  // on, of which p is the first word. Summed in the order of `vec_values`.
  void (*vec_row_values)(const uint32_t* p, const char* const* v, int count, int head_size,
                         float* o);
  // Packs 16 slots as half `half` of a group.
  void (*pack)(const PackSource& src, Element element, int half, int head_size, int padded_words,
               void* k_dst, void* v_dst);
  // Normalises and writes rows to the output.
  void (*write)(const float* o, const float* l, int rows, int head_size, const RowTarget& target,
                int first_row);
  // Takes the share of the slots behind those of `to` into it.
  void (*merge)(const Partial& to, const Partial& from, int rows, int head_size);
};

const AttnVariant* variant_plain();
const AttnVariant* variant_avx2();
const AttnVariant* variant_avx512();
const AttnVariant* variant_avx512_bf16();
const AttnVariant* variant_amx();

// The variant under the current choice of instruction set; `bf16` where all operands are.
const AttnVariant* select_variant(bool bf16);

}  // namespace specplug
