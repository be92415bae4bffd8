// The threads that compute a step together.
#pragma once

#include <atomic>
#include <functional>
#include <sched.h>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

// Work is dealt out in small pieces, so that a thread whose core another process takes holds up one piece and not its
// whole share; who waits spins only so long as a healthy member could need, then lets others have the core.
class Team {
 public:
  explicit Team(int size) : size(size) {
    for (int number = 1; number < size; number++) members.emplace_back([this] { serve(); });
  }

  ~Team() {
    job = nullptr;
    round.fetch_add(1, std::memory_order_release);
    round.notify_all();
    for (auto &member : members) member.join();
  }

  // Runs `work` on every thread, the caller's included.
  void run(const std::function<void()> &work) {
    job = &work;
    dealt.store(0, std::memory_order_relaxed);
    round.fetch_add(1, std::memory_order_release);
    round.notify_all();
    work();
    barrier();
  }

  // Calls `piece(i)` once for every i below `count`, on whichever thread is free; all are done when it returns.
  template <class Piece>
  void each(int count, const Piece &piece) {
    for (int i; (i = dealt.fetch_add(1, std::memory_order_relaxed)) < count;) piece(i);
    barrier();
  }

  const int size;

 private:
  static constexpr int SPINS = 2000;

  void barrier() {
    uint32_t now = passed.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived.store(0, std::memory_order_relaxed);
      dealt.store(0, std::memory_order_relaxed);
      passed.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spin = 0; passed.load(std::memory_order_acquire) == now; spin++) {
      if (spin < SPINS)
        PAUSE();
      else
        sched_yield();
    }
  }

  void serve() {
    uint32_t seen = 0;
    while (true) {
      for (int spin = 0; spin < SPINS && round.load(std::memory_order_acquire) == seen; spin++) PAUSE();
      round.wait(seen, std::memory_order_acquire);
      seen++;
      if (!job) return;
      (*job)();
      barrier();
    }
  }

  std::vector<std::thread> members;
  const std::function<void()> *job = nullptr;
  alignas(64) std::atomic<uint32_t> round{0};
  alignas(64) std::atomic<int> dealt{0};
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<uint32_t> passed{0};
};
