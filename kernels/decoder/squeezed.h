// Weights in bfloat16 at three quarters of their size, without loss.
//
// Trained weights lie close together: of the 256 values of their upper bytes, sign and most of the exponent, a tile has
// nearly always the same 16, so that 4 bits say which (after Zhang et al. 2025, DFloat11, which spends as few bits as
// an entropy code can; 4 for all are what a processor unpacks faster than its memory gives them). The lower bytes stay.
// Groups of weights with another upper byte stay as they are, so that nothing is rounded.
#pragma once

#include "vector.h"

#if defined(__AVX512BW__)
#define CAN_SQUEEZE 1

#include <algorithm>
#include <array>
#include <numeric>

// Weights that are unpacked together: 64 bytes with two codes each, then two times 64 lower bytes.
constexpr int GROUP = 128;
constexpr int SQUEEZED_BYTES = GROUP / 2 + GROUP;

// One tile's weights. They begin with the 16 upper bytes, then a bit per group, set where it is as it was, up to a
// multiple of 64 bytes.
static inline int64_t squeezed_head(int64_t groups) { return (16 + (groups + 7) / 8 + 63) / 64 * 64; }

// Byte of a squeezed group's half in which the number-th of its 64 weights lies: where unpacking two vectors lane by
// lane takes it from.
static inline int squeezed_place(int number) { return number % 32 / 8 * 16 + number / 32 * 8 + number % 8; }

// Squeezes weights, a multiple of GROUP, and returns how many bytes they take; `to` has room for them as they were and
// the head.
static inline int64_t squeeze(uint8_t *to, const uint16_t *from, int64_t count) {
  const int64_t groups = count / GROUP;
  std::array<int64_t, 256> times{};
  for (int64_t i = 0; i < count; i++) times[from[i] >> 8]++;
  std::array<uint8_t, 256> order, code;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return times[a] > times[b]; });
  code.fill(16);
  for (int i = 0; i < 16; i++) code[order[i]] = i;
  memset(to, 0, squeezed_head(groups));
  memcpy(to, order.data(), 16);
  uint8_t *at = to + squeezed_head(groups);
  for (int64_t group = 0; group < groups; group++, from += GROUP) {
    if (std::any_of(from, from + GROUP, [&](uint16_t weight) { return code[weight >> 8] > 15; })) {
      to[16 + group / 8] |= 1 << group % 8;
      memcpy(at, from, GROUP * 2);
      at += GROUP * 2;
      continue;
    }
    memset(at, 0, GROUP / 2);
    for (int i = 0; i < GROUP; i++) {
      const int place = squeezed_place(i % 64);
      at[place] |= code[from[i] >> 8] << (i < 64 ? 0 : 4);
      at[GROUP / 2 + i / 64 * 64 + place] = from[i] & 0xff;
    }
    at += SQUEEZED_BYTES;
  }
  return at - to;
}

// Reads a tile's weights in order, a few groups at a time.
class Unpacker {
 public:
  Unpacker(const char *tile, int64_t groups)
      : kept((const uint8_t *)tile + 16), at((const uint8_t *)tile + squeezed_head(groups)),
        upper(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)tile))) {}

  // The next groups' weights, as they were; returns where those after them lie.
  const char *next(int64_t groups, Bfloat16 *to) {
    const __m512i low_codes = _mm512_set1_epi8(15);
    for (int64_t end = group + groups; group < end; group++, to += GROUP) {
      auto line = [&](int number) { return _mm512_loadu_si512(at + number * 64); };
      auto write = [&](int number, __m512i value) { _mm512_storeu_si512((uint8_t *)to + number * 64, value); };
      if (kept[group / 8] >> group % 8 & 1) [[unlikely]] {
        for (int number = 0; number < 4; number++) write(number, line(number));
        at += GROUP * 2;
        continue;
      }
      const __m512i codes = line(0);
      for (int half = 0; half < 2; half++) {
        const __m512i mine = _mm512_and_si512(half ? _mm512_srli_epi16(codes, 4) : codes, low_codes);
        const __m512i high = _mm512_shuffle_epi8(upper, mine), low = line(1 + half);
        write(2 * half, _mm512_unpacklo_epi8(low, high));
        write(2 * half + 1, _mm512_unpackhi_epi8(low, high));
      }
      at += SQUEEZED_BYTES;
    }
    return (const char *)at;
  }

 private:
  const uint8_t *kept, *at;
  int64_t group = 0;
  const __m512i upper;
};
#else
#define CAN_SQUEEZE 0
#endif
