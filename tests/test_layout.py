"""Stage 3, memory hierarchy, alone: the shared-memory layout of csrc/cuda/device/tile.cuh.

A host model of tile_offset and of the addresses that the copies and fragment loads use; bank
conflicts are counted, not measured.
"""

import re
from pathlib import Path

import pytest

SOURCE = (Path(__file__).parent.parent / "csrc" / "cuda" / "device" / "tile.cuh").read_text()
TILES = [(64, 64), (128, 64), (128, 96), (64, 128), (128, 128), (64, 192), (64, 256), (32, 256)]


def tile_offset(rows: int, row: int, col: int) -> int:
    """Byte offset of element (row, col) of a [rows, *] 16-bit tile, as in tile.cuh."""
    chunk = ((col % 64) // 8) ^ (row & 7)
    return (col // 64) * rows * 128 + row * 128 + chunk * 16 + col % 8 * 2


def unswizzled(rows: int, row: int, col: int) -> int:
    return (col // 64) * rows * 128 + row * 128 + col % 64 * 2


def extra_wavefronts(addresses: list[int]) -> int:
    """Eight 16-byte accesses served together: 0 when they cover the 32 banks once."""
    groups = [address // 16 % 8 for address in addresses]
    return max(groups.count(g) for g in groups) - 1


def test_model_follows_the_source():
    formula = re.sub(r"\s+", " ", SOURCE)
    assert "(col / kSlabCols) * (kRows * 128) + row * 128" in formula
    assert "((((col % kSlabCols) / 8) ^ (row & 7)) * 16)" in formula


@pytest.mark.parametrize(("rows", "cols"), TILES)
def test_every_element_has_its_own_place_and_chunks_are_aligned(rows, cols):
    size = rows * -(-cols // 64) * 128
    offsets = {tile_offset(rows, r, c) for r in range(rows) for c in range(cols)}
    assert len(offsets) == rows * cols and max(offsets) < size
    assert all(tile_offset(rows, r, c) % 16 == 0 for r in range(rows) for c in range(0, cols, 8))


def conflicts(offset, rows: int, cols: int) -> int:
    """Extra wavefronts of all fragment loads and of the copies of one tile.

    ldmatrix, plain or transposed, reads eight rows of one 16-byte column chunk at a time; a copy
    writes eight neighbouring chunks, of one row or of the end of one and the begin of the next.
    """
    total = 0
    for row in range(0, rows, 8):
        for col in range(0, cols, 8):
            total += extra_wavefronts([offset(rows, row + i, col) for i in range(8)])
    chunks = [(r, c) for r in range(rows) for c in range(0, cols, 8)]
    for i in range(0, len(chunks), 8):
        total += extra_wavefronts([offset(rows, r, c) for r, c in chunks[i : i + 8]])
    return total


@pytest.mark.parametrize(("rows", "cols"), [t for t in TILES if t[1] % 64 == 0])
def test_no_bank_conflicts(rows, cols):
    assert conflicts(tile_offset, rows, cols) == 0


def test_head_dim_96_conflicts_only_where_a_copy_wraps_a_row():
    loads_only = sum(
        extra_wavefronts([tile_offset(64, row + i, col) for i in range(8)])
        for row in range(0, 64, 8)
        for col in range(0, 96, 8)
    )
    assert loads_only == 0


def test_without_the_swizzle_there_are_conflicts():
    assert conflicts(unswizzled, 64, 64) > 0
