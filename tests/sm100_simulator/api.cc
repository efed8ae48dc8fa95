// The C functions that the Python binding calls.
#include "session.h"

using namespace simulator;

namespace {
Session* current = nullptr;
}  // namespace

namespace simulator {
Session* active() { return current; }
}  // namespace simulator

extern "C" {

void* simulator_create(int adversarial, unsigned long long seed, unsigned sms, unsigned long long max_instructions,
                       int allow_unwaited_loads, int allow_relaxed_release) {
  Settings s;
  s.adversarial = adversarial;
  s.seed = seed;
  s.sms = sms;
  s.max_instructions = max_instructions;
  s.allow_unwaited_loads = allow_unwaited_loads;
  s.allow_relaxed_release = allow_relaxed_release;
  return new Session(s);
}
void simulator_destroy(void* session) {
  if (current == session) current = nullptr;
  delete static_cast<Session*>(session);
}
// The session that the CUDA runtime's functions work on.
void simulator_activate(void* session) { current = static_cast<Session*>(session); }
void* simulator_active() { return current; }
int simulator_device() { return current ? current->number : 0; }
void* simulator_allocate(void* session, unsigned long long bytes) {
  return static_cast<Session*>(session)->allocate(bytes);
}
int simulator_release(void* session, void* p) { return static_cast<Session*>(session)->release(p); }
void simulator_add_range(void* session, void* p, unsigned long long bytes, int writable) {
  static_cast<Session*>(session)->machine.memory.add(u64(p), bytes, writable);
}
void simulator_remove_range(void* session, void* p) { static_cast<Session*>(session)->machine.memory.remove(u64(p)); }
char const* simulator_category(void* session) { return static_cast<Session*>(session)->category.c_str(); }
char const* simulator_text(void* session) { return static_cast<Session*>(session)->text.c_str(); }
char const* simulator_map_problem(void* session) { return static_cast<Session*>(session)->map_problem.c_str(); }
void simulator_clear_failure(void* session) {
  auto& s = *static_cast<Session*>(session);
  s.category.clear();
  s.text.clear();
  s.map_problem.clear();
  s.last_error = 0;
}
char const* simulator_report(void* session) {
  thread_local std::string text;
  text = static_cast<Session*>(session)->report();
  return text.c_str();
}

}  // extern "C"
