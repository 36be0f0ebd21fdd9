"""Stage 1, tiling, alone: csrc/tiling.h, the very header of the kernels, against brute force."""

import ctypes
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest

HEADER = Path(__file__).parent.parent / "csrc" / "tiling.h"
NO_LIMIT = 2**31 - 1
SKIP, FULL, MASKED = 0, 1, 2

# Checks every problem of the given sizes in C++ (Python would take minutes) and returns how many
# break a rule. Groups of heads share the rows' tiling, so no head count appears here.
SOURCE = """
#include <vector>

#include "tiling.h"
using namespace hfb;
static bool sees(const Band& b, int row, int key) {
  const long long position = (long long)row + b.offset;
  return (b.left == kNoLimit || key >= position - b.left) &&
         (b.right == kNoLimit || key <= position + b.right);
}
extern "C" int broken(int len_q, int len_kv, int left, int right, int offset, int m, int n) {
  const Band band = {left, right, offset};
  int errors = 0;
  for (int row = 0; row < len_q; ++row) {
    const KeyRange keys = band_keys(band, row, len_kv);
    for (int key = 0; key < len_kv; ++key) {
      errors += sees(band, row, key) != (key >= keys.begin && key < keys.end);
    }
  }
  for (int row0 = 0; row0 < len_q; row0 += m) {
    RowBlock rows = RowBlock::none(len_kv);
    const int row1 = min_i32(row0 + m, len_q);
    for (int row = row0; row < row1; ++row) rows.add(band_keys(band, row, len_kv));
    const TileSpan span = visited_key_tiles(rows, n), full = full_key_tiles(rows, span, n);
    errors += full.first < span.first || full.last > max_i32(span.first, span.last);
    for (int tile = 0; tile < ceil_div(len_kv, n); ++tile) {
      const int key0 = tile * n, key1 = min_i32(key0 + n, len_kv);
      const TileKind kind = classify_tile(rows, key0, key0 + n);
      bool any = false, all = key0 + n <= len_kv;
      for (int row = row0; row < row1; ++row)
        for (int key = key0; key < key1; ++key) {
          const bool visible = sees(band, row, key);
          any |= visible, all &= visible;
        }
      const bool visited = tile >= span.first && tile < span.last;
      errors += any != (visited && kind != TileKind::kSkip);  // each visible pair in one tile
      errors += visited && kind == TileKind::kSkip;           // the span holds no invisible tile
      errors += any && all != (kind == TileKind::kFull);      // unmasked exactly when all see all
      errors += visited && (kind == TileKind::kFull) != (tile >= full.first && tile < full.last);
      const TileSpan back = visited_row_tiles(band, key0, key1, len_q, m);
      const int row_tile = row0 / m;
      errors += any && (row_tile < back.first || row_tile >= back.last);  // backward reaches it too
    }
  }
  return errors;
}
extern "C" int broken_order(int num_m, int num_heads, int section_heads, bool is_folded) {
  const TileOrder order = {num_m, num_heads, section_heads, is_folded};
  std::vector<int> taken(num_m * num_heads);
  int errors = 0;
  for (int item = 0; item < order.num_items(); ++item) {
    int rows = 0, parts = 0;
    for (int part = 0; part < order.tiles_per_item(); ++part) {
      const QueryTile tile = order.at(item, part);
      if (tile.tile < 0) continue;
      if (tile.tile >= num_m || tile.head < 0 || tile.head >= num_heads) return 1 << 20;
      ++taken[tile.head * num_m + tile.tile];
      rows += tile.tile, ++parts;
    }
    // the tiles of a folded item are each other's mirror image
    errors += is_folded && 2 * rows != (num_m - 1) * parts;
  }
  for (int count : taken) errors += count != 1;
  return errors;
}
"""


def build(folder: Path, header: str) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder.mkdir()
    (folder / "tiling.h").write_text(header)
    (folder / "check.cpp").write_text(SOURCE)
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "check.cpp", "-o", "check.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "check.so"))


def count_broken(library: ctypes.CDLL) -> int:
    total = 0
    lengths = (0, 1, 2, 3, 5, 8, 9)
    for len_q, len_kv in product(lengths, lengths):
        windows = product((NO_LIMIT, 0, 1, 4), (NO_LIMIT, 0, 2))
        for (left, right), shift in product(windows, (-9, -2, 0, 1, 7)):
            for m, n in ((1, 1), (2, 3), (4, 4), (16, 2)):
                offset = len_kv - len_q + shift
                total += library.broken(len_q, len_kv, left, right, offset, m, n)
    return total


def count_broken_orders(library: ctypes.CDLL) -> int:
    sizes = product((1, 2, 3, 7, 8), (1, 2, 5, 12), (1, 2, 4, 12), (False, True))
    return sum(library.broken_order(*size) for size in sizes if size[2] <= size[1])


def test_every_query_tile_is_taken_once(tmp_path):
    assert count_broken_orders(build(tmp_path / "real", HEADER.read_text())) == 0


ORDER_MUTATIONS = {
    "middle tile twice": ("low == high ? -1 : low", "low"),
    "last pair dropped": ("ceil_div(num_m, 2)", "num_m / 2"),
    "short section as a whole one": ("min_i32(section_heads, num_heads - first)", "section_heads"),
    "no mirror": ("high = num_m - 1 - low", "high = (low + 1) % num_m"),
}


@pytest.mark.parametrize("name", ORDER_MUTATIONS)
def test_a_wrong_order_fails(tmp_path, name):
    before, after = ORDER_MUTATIONS[name]
    header = HEADER.read_text()
    assert before in header
    assert count_broken_orders(build(tmp_path / "mutant", header.replace(before, after))) > 0


def test_every_visible_pair_is_visited_once_and_no_invisible_tile(tmp_path):
    assert count_broken(build(tmp_path / "real", HEADER.read_text())) == 0


MUTATIONS = {
    "band end off by one": ("position + band.right + 1", "position + band.right"),
    "band begin off by one": ("position - band.left", "position - band.left + 1"),
    "last tile dropped": ("ceil_div(rows.end, block_n)", "rows.end / block_n"),
    "full span too long": ("rows.full_end / block_n", "ceil_div(rows.full_end, block_n)"),
    "full too early": ("key_begin >= rows.full_begin", "key_begin + 1 >= rows.full_begin"),
    "backward starts late": ("static_cast<int32_t>(first) / block_m", "ceil_div(first, block_m)"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_header_fails(tmp_path, name):
    before, after = MUTATIONS[name]
    header = HEADER.read_text()
    assert before in header
    assert count_broken(build(tmp_path / "mutant", header.replace(before, after))) > 0


@pytest.mark.parametrize("extreme", [NO_LIMIT - 1, 2**30])
def test_extreme_windows_do_not_overflow(tmp_path, extreme):
    library = build(tmp_path / "real", HEADER.read_text())
    assert library.broken(5, 7, extreme, 0, 2, 2, 3) == 0
    assert library.broken(5, 7, extreme, extreme, -(2**30), 2, 3) == 0
