// SPDX-License-Identifier: Apache-2.0
// Products of rows with a compressed weight. Included behind `packed_columns.inl`.

namespace specplug {
namespace {
namespace compressed {

constexpr int64_t kUnitBytes = kUnitLines * kLine, kPlainUnitBytes = kPlainUnitLines * kLine;

// Vector v of the unit at `unit`.
template <bool kPlain>
ALWAYS_INLINE __m512i words_of(const char* unit, int v, __m512i table) {
  const auto line = [&](int i) __attribute__((always_inline)) {
    return _mm512_loadu_si512(unit + i * kLine);
  };
  if constexpr (kPlain) return line(v);
  constexpr int kOr = 0xfe, kAndOr = 0xf8;  // a | b | c and a | (b & c)
  if (v < kUnitLines) {
    const __m512i words = line(v);
    return _mm512_ternarylogic_epi32(_mm512_permutexvar_epi16(words, table),
                                     _mm512_srli_epi16(words, 5), _mm512_set1_epi16(0x7f), kAndOr);
  }
  // 8 of the 12 bits; the upper 4 of the mantissa's are in the third line.
  const __m512i lower =
      _mm512_ternarylogic_epi32(_mm512_srli_epi16(line(0), 12), _mm512_srli_epi16(line(1), 8),
                                _mm512_set1_epi16(0xf0), kAndOr);
  const __m512i upper = _mm512_and_si512(_mm512_srli_epi16(line(2), 9), _mm512_set1_epi16(0x78));
  return _mm512_ternarylogic_epi32(_mm512_permutexvar_epi16(lower, table),
                                   _mm512_srli_epi16(lower, 5), upper, kOr);
}

// Some rows by a piece.
struct Piece {
  const CompressedProduct& product;
  int64_t row, panel;
  const char *at, *x;
  int64_t units;
  // Sums of earlier pieces come from here and go here, [rows, 32], but for those of the first and
  // the last.
  float* sums;
  bool is_first, is_last;
  const char* ahead;  // what is asked for meanwhile
  int64_t lines;
};

// Up to two rows are done with a line before the next one comes, wherever it was asked for from:
// then the first cache is asked for at once. More rows ask for the second, which can wait for more
// lines from memory, and soon after for the first. (Zen 4: 12 rows by 159 MB take 11.5 ms in place
// of 13.7, one row 6.5 in place of 7.4.)
constexpr int kRowsFromMemory = 2;
constexpr int64_t kSoon = 4096, kAtOnce = 16384;

// R rows by V vectors of columns, from vector `first` on, for `units` units; `ahead` is where the
// next lines are asked for.
template <int R, int V, bool kPlain>
ALWAYS_INLINE void add_units(__m512 (&sums)[R][V], const char* unit, int64_t units, __m512i table,
                             const char* x, int64_t x_stride, const char* ahead, const char* end,
                             int64_t lines_per_unit) {
  constexpr int64_t kBytes = kPlain ? kPlainUnitBytes : kUnitBytes;
  const int64_t step = pair_step(x_stride);
  for (int64_t i = 0; i < units; ++i, unit += 2 * kBytes) {
    if constexpr (R <= kRowsFromMemory) {
      for (int64_t at = 0; at < V * kBytes; at += kLine)
        _mm_prefetch(unit + kAtOnce + at, _MM_HINT_T0);
    } else {
      for (int64_t j = 0; j < lines_per_unit && ahead < end; ++j, ahead += kLine)
        _mm_prefetch(ahead, _MM_HINT_T1);
      for (int64_t at = 0; at < V * kBytes; at += kLine)
        _mm_prefetch(unit + kSoon + at, _MM_HINT_T0);
    }
#pragma GCC unroll 4
    for (int g = 0; g < kUnitGroups; ++g, x += step) {
      Pairs columns[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v)
        columns[v] = make_pairs(words_of<kPlain>(unit + v * kBytes, g, table));
#pragma GCC unroll 32
      for (int r = 0; r < R; ++r) add_products(sums[r], columns, x, r, x_stride);
    }
  }
}

template <int R, int V>
ALWAYS_INLINE void add_part(const Piece& p, int first, int64_t begin, int64_t lines) {
  const CompressedProduct& product = p.product;
  const int64_t lines_per_unit = (lines + p.units - 1) / p.units;
  const int64_t unit_step = kUnitGroups * pair_step(product.x_stride);
  const char *const ahead = p.ahead + begin * kLine, *const end = ahead + lines * kLine;
  float* const held = p.sums + first * 16;
  __m512 sums[R][V];
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v)
      sums[r][v] =
          p.is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(held + r * kPanelColumns + v * 16);
  const char* at = p.at;
  for (int64_t unit = 0; unit < p.units; unit += kBlockUnits) {
    const int64_t count = std::min(kBlockUnits, p.units - unit);
    uint16_t head;
    std::memcpy(&head, at, sizeof(head));
    const bool is_plain = (head & kIsPlain) != 0;
    const __m512i table = _mm512_loadu_si512(at);
    at += kLine;
    const char *const x = p.x + unit * unit_step, *const next =
                                                      ahead + unit * lines_per_unit * kLine;
    if (is_plain)
      add_units<R, V, true>(sums, at + first * kPlainUnitBytes, count, table, x, product.x_stride,
                            next, end, lines_per_unit);
    else
      add_units<R, V, false>(sums, at + first * kUnitBytes, count, table, x, product.x_stride, next,
                             end, lines_per_unit);
    at += 2 * count * (is_plain ? kPlainUnitBytes : kUnitBytes);
  }
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) {
    const int64_t column = p.panel * kPanelColumns + (first + v) * 16;
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
      if (p.is_last)
        store(sums[r][v], product.bias, product.out, product.columns, p.row + r, column);
      else
        _mm512_storeu_ps(held + r * kPanelColumns + v * 16, sums[r][v]);
  }
}

// The sums of a few rows by a panel, or of many by half of it, fill the registers for sums.
constexpr int kFewRows = kSumRegisters / 2, kManyRows = kSumRegisters;

template <int R>
void add_piece(const Piece& p) {
  if constexpr (R <= kFewRows) {
    add_part<R, 2>(p, 0, 0, p.lines);
  } else {
    add_part<R, 1>(p, 0, 0, p.lines / 2);
    add_part<R, 1>(p, 1, p.lines / 2, p.lines - p.lines / 2);
  }
}

using AddPiece = void (*)(const Piece&);

template <int... R>
constexpr std::array<AddPiece, sizeof...(R) + 1> by_rows(std::integer_sequence<int, R...>) {
  return {nullptr, add_piece<R + 1>...};
}
constexpr auto kAddPiece = by_rows(std::make_integer_sequence<int, kManyRows>{});

// Rows of this many bytes stay in the first cache beside what is multiplied. Longer ones pass a few
// panels piece by piece, whose sums stay in the first cache.
constexpr int64_t kRowBytes = 24576, kSumBytes = 16384;
// So many pieces are between what is multiplied and what is asked for.
constexpr int64_t kPiecesAhead = 2;

// The pieces of some panels in the order in which they are multiplied: those of the first
// `group` panels, depth by depth, then those of the next ones.
struct Order {
  int64_t panel, piece, group_first, group_last;
  int64_t last, group, pieces;

  Order(int64_t first, int64_t last, int64_t group, int64_t pieces)
      : panel(first),
        piece(0),
        group_first(first),
        group_last(std::min(first + group, last)),
        last(last),
        group(group),
        pieces(pieces) {}

  bool is_over() const { return panel >= last; }

  void advance() {
    if (++panel < group_last) return;
    panel = group_first;
    if (++piece < pieces) return;
    piece = 0;
    panel = group_first = group_last;
    group_last = std::min(group_first + group, last);
  }
};

// The panels [first, last) of a product.
void multiply(const CompressedProduct& p, int64_t first, int64_t last) {
  const int64_t tile = p.tile_rows, blocks = (p.rows + tile - 1) / tile;
  const int64_t pieces = (p.units + kPieceUnits - 1) / kPieceUnits;
  const int64_t panels = (p.columns + kPanelColumns - 1) / kPanelColumns;
  const int64_t panel_sums = p.rows * kPanelColumns;
  const bool fits = p.rows * p.units * kUnitDepth * kNumberBytes <= kRowBytes;
  const int64_t group =
      fits ? 1
           : std::max<int64_t>(1, kSumBytes / (panel_sums * static_cast<int64_t>(sizeof(float))));
  const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(group * panel_sums)]);
  const auto start = [&](const Order& at) {
    return p.weight + p.starts[at.panel * pieces + at.piece];
  };
  const auto end = [&](const Order& at) {
    return p.weight + p.starts[at.panel * pieces + at.piece + 1];
  };
  Order at(first, last, group, pieces), ahead = at;
  for (int64_t i = 0; i < kPiecesAhead && !ahead.is_over(); ++i) ahead.advance();
  // Behind the last panel is what is multiplied next, if weights lie in that order.
  const char* behind = p.weight + p.starts[panels * pieces];
  for (; !at.is_over(); at.advance()) {
    const char *from = nullptr, *to = nullptr;
    if (!ahead.is_over()) {
      from = start(ahead), to = end(ahead);
      ahead.advance();
    } else if (last == panels) {
      from = behind, to = behind += end(at) - start(at);
    }
    const int64_t lines = (to - from) / kLine;
    float* const held = sums.get() + (at.panel - at.group_first) * panel_sums;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t row = b * tile, rows = std::min(tile, p.rows - row);
      const int64_t line = lines * b / blocks;
      const int64_t unit = at.piece * kPieceUnits;
      kAddPiece[static_cast<size_t>(rows)](
          {p, row, at.panel, start(at),
           p.x + row * p.row_bytes + unit * kUnitGroups * pair_step(p.x_stride),
           std::min(kPieceUnits, p.units - unit), held + row * kPanelColumns, at.piece == 0,
           at.piece == pieces - 1, from + line * kLine, lines * (b + 1) / blocks - line});
    }
  }
}

}  // namespace compressed
}  // namespace
}  // namespace specplug
