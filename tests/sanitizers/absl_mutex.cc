// absl::Mutex and absl::CondVar over pthread, for tests under the thread sanitizer. Debian's absl is compiled
// without the sanitizer, which therefore sees none of its locks and takes everything that they guard for a
// race; pthread's it knows. A program's own definitions come before those of a shared library, also for the
// library itself. Conditions are asked by whoever waits for them, with the lock held, and never by the one
// that unlocks: a race in a condition is a race here, too.
#include "absl/synchronization/mutex.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"

namespace absl {
ABSL_NAMESPACE_BEGIN
namespace {

struct LockState {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed = PTHREAD_COND_INITIALIZER;  // anything that a condition may look at
  ~LockState() {
    pthread_cond_destroy(&changed);
    pthread_mutex_destroy(&mutex);
  }
};
struct Waiters {
  pthread_cond_t signal = PTHREAD_COND_INITIALIZER;
  ~Waiters() { pthread_cond_destroy(&signal); }
};

// Both classes consist of one word, zero at first: a pointer to what stands in for them.
template <typename State, typename Object>
std::atomic<State*>& WordOf(const Object* object) {
  static_assert(sizeof(Object) == sizeof(std::atomic<State*>));
  return *reinterpret_cast<std::atomic<State*>*>(const_cast<Object*>(object));
}

template <typename State, typename Object>
State& StateOf(const Object* object) {
  std::atomic<State*>& word = WordOf<State>(object);
  State* state = word.load(std::memory_order_acquire);
  if (state == nullptr) {
    auto* made = new State;
    if (word.compare_exchange_strong(state, made, std::memory_order_acq_rel)) return *made;
    delete made;
  }
  return *state;
}

LockState& LockOf(const Mutex* mutex) { return StateOf<LockState>(mutex); }
pthread_cond_t& SignalOf(const CondVar* variable) { return StateOf<Waiters>(variable).signal; }

// Returns whether the deadline has passed.
bool WaitUntil(pthread_cond_t& signal, pthread_mutex_t& mutex, Time deadline) {
  if (deadline == InfiniteFuture()) {
    pthread_cond_wait(&signal, &mutex);
    return false;
  }
  const timespec time = ToTimespec(std::max(deadline, UnixEpoch()));
  return pthread_cond_timedwait(&signal, &mutex, &time) == ETIMEDOUT;
}

}  // namespace

Mutex::~Mutex() { delete WordOf<LockState>(this).load(); }

void Mutex::Lock() { DFLASH_CHECK(pthread_mutex_lock(&LockOf(this).mutex) == 0); }
void Mutex::Unlock() {
  auto& lock = LockOf(this);
  pthread_cond_broadcast(&lock.changed);
  DFLASH_CHECK(pthread_mutex_unlock(&lock.mutex) == 0);
}
bool Mutex::TryLock() { return pthread_mutex_trylock(&LockOf(this).mutex) == 0; }
void Mutex::ReaderLock() { Lock(); }
void Mutex::ReaderUnlock() { Unlock(); }
bool Mutex::ReaderTryLock() { return TryLock(); }

void Mutex::Await(const Condition& condition) { AwaitWithDeadline(condition, InfiniteFuture()); }
bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  return AwaitWithDeadline(condition, Now() + timeout);
}
bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  auto& lock = LockOf(this);
  while (!condition.Eval()) {
    if (WaitUntil(lock.changed, lock.mutex, deadline)) return condition.Eval();
  }
  return true;
}

void Mutex::LockWhen(const Condition& condition) {
  Lock();
  Await(condition);
}
bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  Lock();
  return AwaitWithTimeout(condition, timeout);
}
bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  Lock();
  return AwaitWithDeadline(condition, deadline);
}
void Mutex::ReaderLockWhen(const Condition& condition) { LockWhen(condition); }
bool Mutex::ReaderLockWhenWithTimeout(const Condition& condition, Duration timeout) {
  return LockWhenWithTimeout(condition, timeout);
}
bool Mutex::ReaderLockWhenWithDeadline(const Condition& condition, Time deadline) {
  return LockWhenWithDeadline(condition, deadline);
}

void Mutex::AssertHeld() const {}
void Mutex::AssertReaderHeld() const {}
void Mutex::AssertNotHeld() const {}
void Mutex::EnableInvariantDebugging(void (*)(void*), void*) {}
void Mutex::EnableDebugLog(const char*) {}
void Mutex::ForgetDeadlockInfo() {}

CondVar::~CondVar() { delete WordOf<Waiters>(this).load(); }

void CondVar::Wait(Mutex* mutex) { WaitWithDeadline(mutex, InfiniteFuture()); }
bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  return WaitWithDeadline(mutex, Now() + timeout);
}
bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  auto& lock = LockOf(mutex);
  pthread_cond_broadcast(&lock.changed);  // waiting unlocks
  return WaitUntil(SignalOf(this), lock.mutex, deadline);
}
void CondVar::Signal() { pthread_cond_signal(&SignalOf(this)); }
void CondVar::SignalAll() { pthread_cond_broadcast(&SignalOf(this)); }
void CondVar::EnableDebugLog(const char*) {}

ABSL_NAMESPACE_END
}  // namespace absl
