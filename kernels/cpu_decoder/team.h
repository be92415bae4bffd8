// The threads that compute a step together.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

#if defined(__SANITIZE_THREAD__)
extern "C" void AnnotateIgnoreReadsBegin(const char *file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char *file, int line);
#endif

// A step is a sequence of phases; the pieces of a phase may be done in any order. A phase is over when all its pieces
// are done, not when all threads have reported. The reason: on a machine with other work, a thread can lose its core in
// the middle of a piece for longer than a whole step takes. If the piece may be computed twice, other threads then
// compute the piece instead, and the late thread notices that it is late. A thread that comes late skips the phases
// that are done.
//
// Each thread first takes the pieces of its own share in order, then the remaining pieces of other threads' shares. So
// a thread finds its data in its cache again, as long as similar pieces have similar positions in all phases.
class PhasePool {
 public:
  // No phase of `each_repeatable` may have more pieces than `most`.
  PhasePool(int size, int64_t most) : size(size), claims(new std::atomic<int64_t>[most]()), shares(new Share[size]()) {
    for (int number = 1; number < size; number++) members.emplace_back([this, number] { serve(number); });
  }

  ~PhasePool() {
    ending = true;
    round.fetch_add(1);
    round.notify_all();
    for (auto &member : members) member.join();
  }

  // Runs `work` on every thread, including the caller's, and returns when all phases of `work` are over. Late threads
  // may run `work` for longer, so everything that `work` uses must belong to `work` or outlive the team.
  void run(std::shared_ptr<std::function<void()>> work) {
    int64_t base = current.load();
    {
      std::lock_guard lock(changing);
      job = {work, base};
    }
    round.fetch_add(1);
    round.notify_all();
    at = base;
    me = 0;
    (*work)();
  }

  // Of `count` pieces, the first in a thread's share; a share ends where the next share begins.
  int64_t begin_of(int64_t share, int64_t count) const { return share * count / size; }

  // A phase: calls `piece(i)` once for every i below `count`, on whichever thread is free.
  template <class Piece>
  void each(int64_t count, const Piece &piece) {
    if (!count) return;
    int64_t phase = at++;
    for (int64_t i; (i = take(phase, count)) >= 0;) {
      piece(i);
      finish(phase, count);
    }
    await(phase, INT64_MAX);
  }

  // Like `each`, but a piece has two parts. `compute(i)` changes nothing that another thread reads, and may run more
  // than once. `commit(i)` writes the result of `compute(i)`, and runs once.
  template <class Compute, class Commit>
  void each_repeatable(int64_t count, const Compute &compute, const Commit &commit) {
    if (!count) return;
    int64_t phase = at++;
    auto attempt = [&](int64_t i) {
#if defined(__SANITIZE_THREAD__)
      // A late thread reads here what later phases write, and then discards its result: the only intended data race.
      // Reads by a thread that has claimed the piece do not race, so the sanitizer checks them.
      AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
      compute(i);
      AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
      if (!claim(i, phase)) return;
      compute(i);
#else
      compute(i);
      if (!claim(i, phase)) return;
#endif
      commit(i);
      finish(phase, count);
    };
    for (int64_t i; (i = take(phase, count)) >= 0;) attempt(i);
    while (!await(phase, PATIENCE))
      for (int64_t i = 0; i < count; i++)
        if (claims[i].load(std::memory_order_relaxed) <= phase) attempt(i);
  }

  const int size;

 private:
  // A piece takes a few microseconds. A thread that has waited that long for the last pieces starts to compute them.
  static constexpr int64_t PATIENCE = 1000;
  // How often a thread polls for the next step before it sleeps.
  static constexpr int64_t SPINS = 2000;
  static constexpr int BITS = 24;

  // The phase, and below it in BITS bits how many pieces of this share are taken in this phase.
  struct alignas(64) Share {
    std::atomic<int64_t> taken{0};
  };

  struct Job {
    std::shared_ptr<std::function<void()>> work;
    int64_t base;
  };

  int64_t take(int64_t phase, int64_t count) {
    for (int i = 0; i < size; i++) {
      const int64_t share = (me + i) % size, begin = begin_of(share, count), end = begin_of(share + 1, count);
      std::atomic<int64_t> &taken = shares[share].taken;
      int64_t seen = taken.load(std::memory_order_acquire);
      while (seen >> BITS == phase && begin + (seen & ((1 << BITS) - 1)) < end)
        if (taken.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel))
          return begin + (seen & ((1 << BITS) - 1));
    }
    return -1;
  }

  bool claim(int64_t i, int64_t phase) {
    int64_t seen = claims[i].load(std::memory_order_relaxed);
    while (seen <= phase)
      if (claims[i].compare_exchange_weak(seen, phase + 1, std::memory_order_acq_rel)) return true;
    return false;
  }

  // Records that a piece is done; the phase cannot end before this record.
  void finish(int64_t phase, int64_t count) {
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
    done.store(0, std::memory_order_relaxed);
    for (int i = 0; i < size; i++) shares[i].taken.store((phase + 1) << BITS, std::memory_order_release);
    current.store(phase + 1, std::memory_order_release);
  }

  // Whether the phase is over within `looks` polls. A thread that waits long yields its core.
  bool await(int64_t phase, int64_t looks) {
    for (int64_t look = 0; current.load(std::memory_order_acquire) <= phase; look++) {
      if (look >= looks) return false;
      if (look < SPINS)
        PAUSE();
      else
        std::this_thread::yield();
    }
    return true;
  }

  void serve(int number) {
    me = number;
    uint32_t seen = 0;
    while (true) {
      for (int64_t spin = 0; spin < SPINS && round.load() == seen; spin++) PAUSE();
      round.wait(seen);
      seen = round.load();
      if (ending) return;
      Job mine;
      {
        std::lock_guard lock(changing);
        mine = job;
      }
      at = mine.base;
      (*mine.work)();
    }
  }

  // The phase that this thread is in, and the thread's number.
  static inline thread_local int64_t at = 0, me = 0;

  // For each piece: 1 + the last phase in which the piece was claimed for its commit.
  const std::unique_ptr<std::atomic<int64_t>[]> claims;
  const std::unique_ptr<Share[]> shares;
  std::mutex changing;
  Job job;
  std::atomic<bool> ending{false};
  alignas(64) std::atomic<uint32_t> round{0};
  // The first phase that is not over.
  alignas(64) std::atomic<int64_t> current{0};
  alignas(64) std::atomic<int64_t> done{0};
  // Declared last, because the threads read the other fields as soon as they start.
  std::vector<std::thread> members;
};
