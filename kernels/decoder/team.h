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

// A step is a row of phases, each of them pieces that may be done in any order. A phase is over when all its pieces are
// done, not when all threads have said so: on a machine with other work a thread may lose its core in the middle of a
// piece for longer than the whole step takes. What can be computed twice, the others then compute in its place, and it
// finds that it is late. A thread that comes late passes over the phases that are done.
class Team {
 public:
  // No phase of `each_repeatable` may have more pieces than `most`.
  Team(int size, int64_t most) : size(size), claims(new std::atomic<int64_t>[most]()) {
    for (int number = 1; number < size; number++) members.emplace_back([this] { serve(); });
  }

  ~Team() {
    ending = true;
    round.fetch_add(1);
    round.notify_all();
    for (auto &member : members) member.join();
  }

  // Runs `work` on every thread, the caller's included, and returns when the phases in it are over. Late threads may be
  // in it for longer: what it uses must be its own, or outlive the team.
  void run(std::shared_ptr<std::function<void()>> work) {
    int64_t base = next.load() >> BITS;
    {
      std::lock_guard lock(changing);
      job = {work, base};
    }
    round.fetch_add(1);
    round.notify_all();
    at = base;
    (*work)();
  }

  // A phase: calls `piece(i)` once for every i below `count`, on whichever thread is free.
  template <class Piece>
  void each(int64_t count, const Piece &piece) {
    int64_t phase = at++;
    for (int64_t i; (i = take(phase, count)) >= 0;) {
      piece(i);
      finish(phase, count);
    }
    await(phase, INT64_MAX);
  }

  // As `each`, of pieces in two parts: `compute(i)` changes nothing that another thread looks at, and may happen more
  // than once; `commit(i)` writes what it found, and happens once.
  template <class Compute, class Commit>
  void each_repeatable(int64_t count, const Compute &compute, const Commit &commit) {
    int64_t phase = at++;
    auto attempt = [&](int64_t i) {
      compute(i);
      if (!claim(i, phase)) return;
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
  // A piece takes a few microseconds; who has waited as long for the last ones begins to do them itself.
  static constexpr int64_t PATIENCE = 1000;
  // How long a thread looks for the next step before it sleeps.
  static constexpr int64_t SPINS = 2000;
  // `next` is the phase, and the first piece of it that nobody has taken.
  static constexpr int BITS = 24;

  struct Job {
    std::shared_ptr<std::function<void()>> work;
    int64_t base;
  };

  int64_t take(int64_t phase, int64_t count) {
    int64_t seen = next.load(std::memory_order_acquire);
    while (seen >> BITS == phase && (seen & ((1 << BITS) - 1)) < count)
      if (next.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) return seen & ((1 << BITS) - 1);
    // A phase of no pieces is nobody's to finish.
    if (!count && seen >> BITS == phase) next.compare_exchange_strong(seen, (phase + 1) << BITS);
    return -1;
  }

  bool claim(int64_t i, int64_t phase) {
    int64_t seen = claims[i].load(std::memory_order_relaxed);
    while (seen <= phase)
      if (claims[i].compare_exchange_weak(seen, phase + 1, std::memory_order_acq_rel)) return true;
    return false;
  }

  // A piece is done; the phase cannot end before this is counted.
  void finish(int64_t phase, int64_t count) {
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
    done.store(0, std::memory_order_relaxed);
    next.store((phase + 1) << BITS, std::memory_order_release);
  }

  // Whether the phase is over before so many looks. Who waits long lets others have the core.
  bool await(int64_t phase, int64_t looks) {
    for (int64_t look = 0; next.load(std::memory_order_acquire) >> BITS <= phase; look++) {
      if (look >= looks) return false;
      if (look < SPINS)
        PAUSE();
      else
        std::this_thread::yield();
    }
    return true;
  }

  void serve() {
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

  static inline thread_local int64_t at = 0;

  // Per piece one more than the last phase in which it was committed.
  const std::unique_ptr<std::atomic<int64_t>[]> claims;
  std::mutex changing;
  Job job;
  std::atomic<bool> ending{false};
  alignas(64) std::atomic<uint32_t> round{0};
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<int64_t> done{0};
  // The last, as they begin to look at the others at once.
  std::vector<std::thread> members;
};
