// Faults on purpose, in a library and a path named like the transport's: what the sanitizers have to find there.
#include <climits>
#include <cstdlib>
#include <thread>

namespace weft {
static int shared = 0;
static void add() {
  for (int i = 0; i < 1000; ++i) ++shared;
}
}  // namespace weft

extern "C" {
void fault_leak() {
  volatile char* lost = static_cast<char*>(std::malloc(4321));
  lost[0] = 1;
  lost = nullptr;
}

void fault_overrun(int past) {
  volatile char* volatile block = static_cast<char*>(std::malloc(16));
  block[15 + past] = 1;
  std::free(const_cast<char*>(block));
}

int fault_undefined(int one) { return INT_MAX + one; }

int fault_race() {
  std::thread first(weft::add), second(weft::add);
  first.join();
  second.join();
  return weft::shared;
}
}
