// SPDX-License-Identifier: Apache-2.0
#include "compressed_panels.h"

#include <algorithm>
#include <cstring>

namespace specplug {
namespace {

constexpr int64_t kVectorNumbers = 32;  // 16 columns by the 2 numbers of a group
constexpr int64_t kUnitVectors = kUnitGroups;
constexpr int kMantissaBits = 7;
constexpr int kPatterns = 1 << 9;

// Of the numbers of a unit: [vectors][16 columns][2].
using Unit = uint16_t[kUnitVectors][kVectorNumbers];

void read_unit(const uint16_t* weight, int64_t columns, int64_t depth, int64_t column, int64_t k,
               Unit& unit) {
  std::memset(unit, 0, sizeof(unit));
  for (int64_t c = 0; c < std::min<int64_t>(16, columns - column); ++c) {
    const uint16_t* from = weight + (column + c) * depth + k;
    for (int64_t i = 0; i < std::min<int64_t>(2 * kUnitGroups, depth - k); ++i)
      unit[i / 2][2 * c + i % 2] = from[i];
  }
}

// The table of a block: place by upper bits.
class Table {
 public:
  Table() { std::memset(places_, -1, sizeof(places_)); }

  void add(const Unit& unit) {
    for (const auto& vector : unit)
      for (const uint16_t number : vector) {
        int8_t& place = places_[number >> kMantissaBits];
        if (place >= 0) continue;
        // Beyond a table's size places do not count.
        place = static_cast<int8_t>(std::min(size_, kTableSize));
        if (size_ < kTableSize)
          entries_[size_] = static_cast<uint16_t>(number >> kMantissaBits << kMantissaBits);
        ++size_;
      }
  }

  bool fits() const { return size_ <= kTableSize; }
  const uint16_t* entries() const { return entries_; }

  // Place and mantissa, 12 bits.
  uint16_t code(uint16_t number) const {
    const int mantissa = number & ((1 << kMantissaBits) - 1);
    return static_cast<uint16_t>(places_[number >> kMantissaBits] | mantissa << 5);
  }

 private:
  int8_t places_[kPatterns];
  uint16_t entries_[kTableSize] = {};
  int64_t size_ = 0;
};

void write_unit(const Table& table, const Unit& unit, char* to) {
  uint16_t lines[kUnitLines][kVectorNumbers];
  for (int64_t i = 0; i < kVectorNumbers; ++i) {
    const int last = table.code(unit[kUnitLines][i]);
    for (int64_t v = 0; v < kUnitLines; ++v)
      lines[v][i] = static_cast<uint16_t>(table.code(unit[v][i]) | (last >> (4 * v) & 0xf) << 12);
  }
  std::memcpy(to, lines, sizeof(lines));
}

// Calls `take(table, units, count)` for every block of the units from `first` to `last`.
template <class Take>
void for_each_block(const uint16_t* weight, int64_t columns, int64_t depth, int64_t panel,
                    int64_t first, int64_t last, const Take& take) {
  for (; first < last; first += kBlockUnits) {
    const int64_t count = 2 * std::min(kBlockUnits, last - first);
    Unit units[2 * kBlockUnits];
    Table table;
    for (int64_t i = 0; i < count; ++i) {
      read_unit(weight, columns, depth, panel * kPanelColumns + i % 2 * 16,
                (first + i / 2) * kUnitDepth, units[i]);
      table.add(units[i]);
    }
    take(table, units, count);
  }
}

}  // namespace

int64_t compressed_bytes(const uint16_t* weight, int64_t columns, int64_t depth, int64_t panel,
                         int64_t first, int64_t last) {
  int64_t lines = 0;
  for_each_block(weight, columns, depth, panel, first, last,
                 [&](const Table& table, const Unit*, int64_t count) {
                   lines += 1 + count * (table.fits() ? kUnitLines : kPlainUnitLines);
                 });
  return lines * kLine;
}

void compress_units(const uint16_t* weight, int64_t columns, int64_t depth, int64_t panel,
                    int64_t first, int64_t last, char* to) {
  for_each_block(weight, columns, depth, panel, first, last,
                 [&](const Table& table, const Unit* units, int64_t count) {
                   const bool fits = table.fits();
                   std::memset(to, 0, kLine);
                   if (fits)
                     std::memcpy(to, table.entries(), kTableSize * sizeof(uint16_t));
                   else
                     std::memcpy(to, &kIsPlain, sizeof(kIsPlain));
                   to += kLine;
                   for (int64_t i = 0; i < count; ++i) {
                     if (fits)
                       write_unit(table, units[i], to);
                     else
                       std::memcpy(to, units[i], sizeof(Unit));
                     to += (fits ? kUnitLines : kPlainUnitLines) * kLine;
                   }
                 });
}

}  // namespace specplug
