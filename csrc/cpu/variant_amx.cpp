// SPDX-License-Identifier: Apache-2.0
// bf16 products on AMX tiles; everything else is the AVX512-BF16 code.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "tree_attn.h"

#pragma GCC target( \
    "amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,bmi2,prefer-vector-width=512")
#define VEC_WORDS 16
#define MAX_ROWS 12
#define MAX_PANELS 2
#define VEC_ROWS 0
#define BF16_DOT 1

namespace specplug {
#include "variant.inl"

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Rows the loaded configuration is for; 0 when none is loaded.
thread_local int loaded_rows = 0;

// rows <= 16: tile 0 holds A, 1-3 hold B, 4-7 hold C, all C of one row tile.
// rows > 16:  tiles 0, 1 hold the two row tiles of A, 2-3 hold B, 4-5 and 6-7 their C.
void configure(int rows) {
  if (loaded_rows == rows) return;
  TileConfig config;
  const bool pair = rows > 16;
  const uint8_t low = pair ? 16 : rows;
  const uint8_t high = pair ? rows - 16 : rows;
  const uint8_t heights[8] = {low, pair ? high : uint8_t{16}, 16, 16, low, low, high, high};
  for (int i = 0; i < 8; ++i) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = heights[i];
  }
  // Some compilers declare only the first bytes as read and would drop the other stores.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  loaded_rows = rows;
}

// Another library may have used the tiles on this thread since the last call.
void begin_tiles() { loaded_rows = 0; }

void end_tiles() {
  _tile_release();
  loaded_rows = 0;
}

constexpr int64_t kTileBytes = 1024;

// The tile loads below do not declare what memory they read: earlier stores must have been made.
inline void commit_stores() { __asm__ volatile("" : : : "memory"); }

void tile_scores(const uint32_t* q, int64_t ld_q, int rows, int words, const KvGroup* groups,
                 int num_groups, float* s, int64_t ld_s) {
  configure(rows);
  commit_stores();
  const int steps = words / 16;
  const int64_t q_row = ld_q * 4;
  const int64_t s_row = ld_s * 4;
  const char* a = reinterpret_cast<const char*>(q);
  if (rows > 16) {
    const char* a_high = a + 16 * q_row;
    for (int g = 0; g < num_groups; ++g) {
      const char* b0 = groups[g].k;
      const char* b1 = b0 + groups[g].k_panel;
      _tile_zero(4);
      _tile_zero(5);
      _tile_zero(6);
      _tile_zero(7);
      for (int k = 0; k < steps; ++k) {
        _tile_loadd(0, a + k * 64, q_row);
        _tile_loadd(2, b0 + k * kTileBytes, 64);
        _tile_dpbf16ps(4, 0, 2);
        _tile_loadd(3, b1 + k * kTileBytes, 64);
        _tile_dpbf16ps(5, 0, 3);
        _tile_loadd(1, a_high + k * 64, q_row);
        _tile_dpbf16ps(6, 1, 2);
        _tile_dpbf16ps(7, 1, 3);
      }
      float* out = s + g * kGroup;
      _tile_stored(4, out, s_row);
      _tile_stored(5, out + 16, s_row);
      _tile_stored(6, out + 16 * ld_s, s_row);
      _tile_stored(7, out + 16 * ld_s + 16, s_row);
    }
    return;
  }
  int g = 0;
  for (; g + 2 <= num_groups; g += 2) {
    const char* b0 = groups[g].k;
    const char* b1 = b0 + groups[g].k_panel;
    const char* b2 = groups[g + 1].k;
    const char* b3 = b2 + groups[g + 1].k_panel;
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int k = 0; k < steps; ++k) {
      _tile_loadd(0, a + k * 64, q_row);
      _tile_loadd(1, b0 + k * kTileBytes, 64);
      _tile_dpbf16ps(4, 0, 1);
      _tile_loadd(2, b1 + k * kTileBytes, 64);
      _tile_dpbf16ps(5, 0, 2);
      _tile_loadd(3, b2 + k * kTileBytes, 64);
      _tile_dpbf16ps(6, 0, 3);
      _tile_loadd(1, b3 + k * kTileBytes, 64);
      _tile_dpbf16ps(7, 0, 1);
    }
    float* out = s + g * kGroup;
    _tile_stored(4, out, s_row);
    _tile_stored(5, out + 16, s_row);
    _tile_stored(6, out + 32, s_row);
    _tile_stored(7, out + 48, s_row);
  }
  if (g < num_groups) {
    const char* b0 = groups[g].k;
    const char* b1 = b0 + groups[g].k_panel;
    _tile_zero(4);
    _tile_zero(5);
    for (int k = 0; k < steps; ++k) {
      _tile_loadd(0, a + k * 64, q_row);
      _tile_loadd(1, b0 + k * kTileBytes, 64);
      _tile_dpbf16ps(4, 0, 1);
      _tile_loadd(2, b1 + k * kTileBytes, 64);
      _tile_dpbf16ps(5, 0, 2);
    }
    float* out = s + g * kGroup;
    _tile_stored(4, out, s_row);
    _tile_stored(5, out + 16, s_row);
  }
}

// COLUMNS panels of one or two row tiles.
template <bool PAIR, int COLUMNS>
void tile_values_block(const char* p, int64_t p_row, const KvGroup* groups, int num_groups,
                       int panel, bool first, float* o, int64_t o_row) {
  float* high = o + 16 * (o_row / 4);
  if (first) {
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
  } else {
    _tile_loadd(4, o, o_row);
    if constexpr (COLUMNS > 1) _tile_loadd(5, o + 16, o_row);
    if constexpr (PAIR) {
      _tile_loadd(6, high, o_row);
      if constexpr (COLUMNS > 1) _tile_loadd(7, high + 16, o_row);
    } else {
      if constexpr (COLUMNS > 2) _tile_loadd(6, o + 32, o_row);
      if constexpr (COLUMNS > 3) _tile_loadd(7, o + 48, o_row);
    }
  }
  for (int g = 0; g < num_groups; ++g) {
    const int64_t step = groups[g].v_panel;
    const char* b = groups[g].v + panel * step;
    _tile_loadd(0, p + g * 64, p_row);
    if constexpr (PAIR) {
      _tile_loadd(2, b, 64);
      _tile_dpbf16ps(4, 0, 2);
      if constexpr (COLUMNS > 1) {
        _tile_loadd(3, b + step, 64);
        _tile_dpbf16ps(5, 0, 3);
      }
      _tile_loadd(1, p + 16 * p_row + g * 64, p_row);
      _tile_dpbf16ps(6, 1, 2);
      if constexpr (COLUMNS > 1) _tile_dpbf16ps(7, 1, 3);
    } else {
      _tile_loadd(1, b, 64);
      _tile_dpbf16ps(4, 0, 1);
      if constexpr (COLUMNS > 1) {
        _tile_loadd(2, b + step, 64);
        _tile_dpbf16ps(5, 0, 2);
      }
      if constexpr (COLUMNS > 2) {
        _tile_loadd(3, b + 2 * step, 64);
        _tile_dpbf16ps(6, 0, 3);
      }
      if constexpr (COLUMNS > 3) {
        _tile_loadd(1, b + 3 * step, 64);
        _tile_dpbf16ps(7, 0, 1);
      }
    }
  }
  _tile_stored(4, o, o_row);
  if constexpr (COLUMNS > 1) _tile_stored(5, o + 16, o_row);
  if constexpr (PAIR) {
    _tile_stored(6, high, o_row);
    if constexpr (COLUMNS > 1) _tile_stored(7, high + 16, o_row);
  } else {
    if constexpr (COLUMNS > 2) _tile_stored(6, o + 32, o_row);
    if constexpr (COLUMNS > 3) _tile_stored(7, o + 48, o_row);
  }
}

void tile_values(const uint32_t* p, int64_t ld_p, int rows, const KvGroup* groups, int num_groups,
                 int head_size, bool first, float* o) {
  configure(rows);
  commit_stores();
  const char* a = reinterpret_cast<const char*>(p);
  const int64_t p_row = ld_p * 4;
  const int64_t o_row = head_size * 4;
  const int panels = head_size / kPanel;
  int panel = 0;
  if (rows > 16) {
    for (; panel + 2 <= panels; panel += 2)
      tile_values_block<true, 2>(a, p_row, groups, num_groups, panel, first, o + panel * 16, o_row);
    if (panel < panels)
      tile_values_block<true, 1>(a, p_row, groups, num_groups, panel, first, o + panel * 16, o_row);
    return;
  }
  for (; panel + 4 <= panels; panel += 4)
    tile_values_block<false, 4>(a, p_row, groups, num_groups, panel, first, o + panel * 16, o_row);
  for (; panel + 2 <= panels; panel += 2)
    tile_values_block<false, 2>(a, p_row, groups, num_groups, panel, first, o + panel * 16, o_row);
  if (panel < panels)
    tile_values_block<false, 1>(a, p_row, groups, num_groups, panel, first, o + panel * 16, o_row);
}

}  // namespace

const AttnVariant* variant_amx() {
  static constexpr AttnVariant variant = [] {
    AttnVariant amx = make_variant("amx");
    amx.begin = begin_tiles;
    amx.end = end_tiles;
    amx.scores = tile_scores;
    amx.values = tile_values;
    return amx;
  }();
  return &variant;
}
}  // namespace specplug
#endif
