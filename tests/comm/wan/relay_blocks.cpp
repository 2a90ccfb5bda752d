// Blocks of a relay's memory, by number, for Python.
#include <map>

#include "relay_memory.hpp"

struct Blocks {
    weft::RelayMemory memory;
    std::map<int, std::shared_ptr<char[]>> held;
};

extern "C" {
Blocks *blocks_open() { return new Blocks; }
void blocks_close(Blocks *blocks) { delete blocks; }
// Where block `number` lies.
char *blocks_take(Blocks *blocks, int number, uint64_t bytes) {
    return (blocks->held[number] = blocks->memory.take(bytes)).get();
}
void blocks_drop(Blocks *blocks, int number) { blocks->held.erase(number); }
uint64_t blocks_bytes(Blocks *blocks) { return blocks->memory.bytes(); }
}
