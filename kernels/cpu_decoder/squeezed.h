// Weights in fewer bytes, without loss.
//
// Trained weights lie close together. A weight's upper byte holds the sign and most of the exponent. Of the 256 values
// of this byte, nearly all weights of a tile have one of the same 16, so 4 bits encode the upper byte. (After Zhang et
// al. 2025, DFloat11, which spends as few bits as an entropy code can. With 4 bits for all weights, a processor unpacks
// faster than its memory delivers.) Lower bytes are kept unless they are 0 in the whole matrix: one byte of bfloat16,
// two of floats that once were float16, else three.
// A group that has a weight with another upper byte is stored as is, so that nothing is rounded.
#pragma once

#include "vector.h"

#if defined(__AVX512BW__)
#define CAN_SQUEEZE 1

#include <algorithm>
#include <array>
#include <numeric>
#include <type_traits>

// The unsqueezed type of weights that need BYTES bytes: bfloat16 for 2, float for 3 and 4.
template <int BYTES>
using Unsqueezed = std::conditional_t<BYTES == 2, Bfloat16, float>;
template <int BYTES>
using Bits = std::conditional_t<BYTES == 2, uint16_t, uint32_t>;

// Weights that are unpacked together: 64 bytes with two codes each, then, for each half of the weights, 64 bytes per
// kind of lower byte, the upper kinds first.
constexpr int GROUP = 128;
template <int BYTES>
constexpr int SQUEEZED_BYTES = GROUP / 2 + GROUP * (BYTES - 1);

// The head of a squeezed tile holds the 16 upper bytes, then one bit per group, set if the group is stored as is. The
// head is padded to a multiple of 64 bytes.
static inline int64_t squeezed_head(int64_t groups) { return (16 + (groups + 7) / 8 + 63) / 64 * 64; }

// Offset of the number-th weight within 64 bytes: the place from which lane-wise unpack instructions take this weight.
template <int BYTES>
static inline int squeezed_offset(int number) {
  constexpr int lane = 16 / sizeof(Unsqueezed<BYTES>);
  return number % (4 * lane) / lane * 16 + number / (4 * lane) * lane + number % lane;
}

// Squeezes `count` weights, a multiple of GROUP, and returns how many bytes they take. `to` has space for the
// unsqueezed weights and the head.
template <int BYTES>
static inline int64_t squeeze(uint8_t *to, const Bits<BYTES> *from, int64_t count) {
  constexpr int size = sizeof(*from);
  const int64_t groups = count / GROUP;
  // The number-th byte, counted from the most significant.
  auto byte = [](Bits<BYTES> weight, int number) { return uint8_t(weight >> (size - 1 - number) * 8); };
  std::array<int64_t, 256> times{};
  for (int64_t i = 0; i < count; i++) times[byte(from[i], 0)]++;
  std::array<uint8_t, 256> order, code;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return times[a] > times[b]; });
  code.fill(16);
  for (int i = 0; i < 16; i++) code[order[i]] = i;
  memset(to, 0, squeezed_head(groups));
  memcpy(to, order.data(), 16);
  uint8_t *at = to + squeezed_head(groups);
  for (int64_t group = 0; group < groups; group++, from += GROUP) {
    if (std::any_of(from, from + GROUP, [&](Bits<BYTES> weight) { return code[byte(weight, 0)] > 15; })) {
      to[16 + group / 8] |= 1 << group % 8;
      memcpy(at, from, GROUP * size);
      at += GROUP * size;
      continue;
    }
    memset(at, 0, GROUP / 2);
    for (int i = 0; i < GROUP; i++) {
      const int offset = squeezed_offset<BYTES>(i % 64);
      at[offset] |= code[byte(from[i], 0)] << (i < 64 ? 0 : 4);
      for (int lower = 1; lower < BYTES; lower++)
        at[GROUP / 2 + (i / 64 * (BYTES - 1) + lower - 1) * 64 + offset] = byte(from[i], lower);
    }
    at += SQUEEZED_BYTES<BYTES>;
  }
  return at - to;
}

// Reads a tile's weights in order, a few groups at a time.
class Unpacker {
 public:
  Unpacker(const char *tile, int64_t groups)
      : kept((const uint8_t *)tile + 16), at((const uint8_t *)tile + squeezed_head(groups)),
        upper(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)tile))) {}

  // Unpacks the next group's bfloat16 weights to the vectors that `next` writes one after the other.
  void next_group(__m512i (&weights)[GROUP / 32]) {
    const bool is_kept = kept[group / 8] >> group % 8 & 1;
    group++;
    if (is_kept) [[unlikely]] {
      for (int i = 0; i < GROUP / 32; i++) weights[i] = _mm512_loadu_si512(at + i * 64);
      at += GROUP * 2;
      return;
    }
    const __m512i codes = _mm512_loadu_si512(at);
    for (int half = 0; half < 2; half++) {
      const __m512i high = upper_bytes(codes, half), below = _mm512_loadu_si512(at + (1 + half) * 64);
      weights[2 * half] = _mm512_unpacklo_epi8(below, high);
      weights[2 * half + 1] = _mm512_unpackhi_epi8(below, high);
    }
    at += SQUEEZED_BYTES<2>;
  }

  // Prefetches the cache lines of a squeezed group that lies `ahead` bytes ahead.
  void fetch(int64_t ahead) const {
    for (int i = 0; i < SQUEEZED_BYTES<2>; i += 64) __builtin_prefetch(at + ahead + i);
  }

  // Writes the unsqueezed weights of the next `groups` groups; returns where the following groups begin.
  template <int BYTES>
  const char *next(int64_t groups, Unsqueezed<BYTES> *to) {
    constexpr int size = sizeof(*to);
    for (int64_t end = group + groups; group < end; group++, to += GROUP) {
      auto line = [&](int number) { return _mm512_loadu_si512(at + number * 64); };
      auto write = [&](int number, __m512i value) { _mm512_storeu_si512((uint8_t *)to + number * 64, value); };
      if (kept[group / 8] >> group % 8 & 1) [[unlikely]] {
        for (int number = 0; number < GROUP * size / 64; number++) write(number, line(number));
        at += GROUP * size;
        continue;
      }
      const __m512i codes = line(0);
      for (int half = 0; half < 2; half++) {
        const __m512i high = upper_bytes(codes, half), below = line(1 + half * (BYTES - 1));
        const __m512i first = _mm512_unpacklo_epi8(below, high), second = _mm512_unpackhi_epi8(below, high);
        if constexpr (BYTES == 2) {
          write(2 * half, first);
          write(2 * half + 1, second);
        } else {
          const __m512i third = line(2 + half * (BYTES - 1));
          const __m512i fourth = BYTES == 4 ? line(3 + half * (BYTES - 1)) : _mm512_setzero_si512();
          const __m512i low_first = _mm512_unpacklo_epi8(fourth, third);
          const __m512i low_second = _mm512_unpackhi_epi8(fourth, third);
          write(4 * half, _mm512_unpacklo_epi16(low_first, first));
          write(4 * half + 1, _mm512_unpackhi_epi16(low_first, first));
          write(4 * half + 2, _mm512_unpacklo_epi16(low_second, second));
          write(4 * half + 3, _mm512_unpackhi_epi16(low_second, second));
        }
      }
      at += SQUEEZED_BYTES<BYTES>;
    }
    return (const char *)at;
  }

 private:
  // The upper bytes of half a group.
  __m512i upper_bytes(__m512i codes, int half) const {
    const __m512i mine = half ? _mm512_srli_epi16(codes, 4) : codes;
    return _mm512_shuffle_epi8(upper, _mm512_and_si512(mine, _mm512_set1_epi8(15)));
  }

  const uint8_t *kept, *at;
  int64_t group = 0;
  const __m512i upper;
};
#else
#define CAN_SQUEEZE 0
#endif
