// sm_90: how the warps of a persistent block agree on the query tile they work on.
//
// The producer warp walks the block's items of a TileOrder, finds the keys of each query tile once,
// and publishes both in a ring of two slots; every other warp reads a slot and frees it when it is
// done with the query tile.
#pragma once

#include "mask.cuh"
#include "tma.cuh"

namespace hfb {

// One query tile, in shared memory.
struct alignas(16) TileSlot {
  int32_t row_begin;  // -1: no more tiles
  int32_t head;       // query head
  int32_t batch;
  int32_t cleared;  // set when inf or NaN was taken out of a V tile
  RowBlock rows;
};
static_assert(sizeof(TileSlot) == 32, "two 16-byte accesses");

constexpr int kTileSlots = 2;

// Position in a ring of kCount buffers, with the parity of the phase a consumer waits for.
template <int kCount>
struct RingPosition {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kCount) index = 0, parity ^= 1;
  }
  __device__ __forceinline__ RingPosition next() const {
    RingPosition other = *this;
    other.advance();
    return other;
  }
};

// Query tiles a warp has taken: gives the slot and the parities of the next one.
struct TileCount {
  uint32_t taken = 0;

  __device__ __forceinline__ void advance() { ++taken; }
  __device__ __forceinline__ int slot() const { return taken % kTileSlots; }
  __device__ __forceinline__ uint32_t slot_parity() const { return taken / kTileSlots % 2; }
  __device__ __forceinline__ uint32_t q_parity() const { return taken % 2; }
};

// Blocks that add to the same memory in a fixed order: a block's turn has come when *turn has reached
// value; it sees all that was added before. One thread each.
__device__ __forceinline__ void wait_for_turn(const int* turn, int value) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory");
  } while (seen < value);
}
__device__ __forceinline__ void end_turn(int* turn) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
}

}  // namespace hfb
