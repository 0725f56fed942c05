// The threads of parallel.h. They sleep between calls and are never ended: the process's end ends them.
#include "cpu/parallel.h"

#include <condition_variable>
#include <list>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace {

struct Job {
  const std::function<void()> *work;
  size_t wanted, active;  // helpers that may still come; those at work
};

class Crew {
 public:
  void run(size_t helpers, const std::function<void()> &work) {
    std::unique_lock<std::mutex> hold(guard);
    const auto job = jobs.insert(jobs.end(), {&work, helpers, 0});
    hire(helpers);
    hold.unlock();
    for (size_t i = 0; i < helpers; i++) called.notify_one();
    work();
    hold.lock();
    job->wanted = 0;  // who has not come by now finds nothing to do
    left.wait(hold, [&] { return job->active == 0; });
    jobs.erase(job);
  }

 private:
  void hire(size_t helpers) {
    try {
      for (; members < helpers; members++) std::thread([this] { serve(); }).detach();
    } catch (...) {  // a thread that did not start: those there are do all the work
    }
  }

  void serve() {
    std::unique_lock<std::mutex> hold(guard);
    for (;;) {
      std::list<Job>::iterator job;
      called.wait(hold, [&] {
        for (job = jobs.begin(); job != jobs.end() && job->wanted == 0;) ++job;
        return job != jobs.end();
      });
      job->wanted--, job->active++;
      hold.unlock();
      (*job->work)();
      hold.lock();
      if (--job->active == 0) left.notify_all();
    }
  }

  std::mutex guard;
  std::condition_variable called, left;
  std::list<Job> jobs;
  size_t members = 0;
};

// A fork's child has none of the threads, and locks as they were: it gets a crew of its own.
Crew *&crew() {
  static Crew *one = [] {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { crew() = new Crew; });
#endif
    return new Crew;
  }();
  return one;
}

}  // namespace

size_t tq::hardware_threads() {
  static const size_t found = std::thread::hardware_concurrency();
  return found ? found : 1;
}

void tq::run_together(size_t helpers, const std::function<void()> &work) {
  if (helpers == 0) return work();
  crew()->run(helpers, work);
}
