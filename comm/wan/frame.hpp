// The wire format: frames; a DATA frame is followed by a chunk.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#endif

namespace weft {

// A connection failed; the text says why.
struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr uint32_t MAGIC = 0x74666577;
constexpr uint32_t MIN_CHUNK = 4u << 10, MAX_CHUNK = 4u << 20;
constexpr uint64_t MAX_MESSAGE = 1ull << 40;

enum Type : uint32_t {
    DATA = 1,  // a chunk of a message
    ACK,       // offset: complete chunks received on this connection so far; message: arrival time of the last,
               // on the receiver's clock
    CREDIT,    // offset: how much of this lane's byte stream the peer may send
    PING,      // offset: the sender's clock
    PONG,      // offset: as in the ping
    BYE,       // this end closes or has failed; the tag says why
};

// Little-endian, like all supported machines. Types without further fields use a `ShortFrame`.
struct Frame {
    uint32_t magic;
    uint16_t type, lane;
    uint64_t message;  // number of the message in its lane
    uint64_t total;    // bytes of the message
    uint64_t offset;   // of the chunk in the message
    uint32_t length;   // bytes that follow this frame
    uint32_t payload_sum;
    char tag[48];
    uint32_t priority;  // lower goes first among messages queued for one link
    uint32_t sum;  // of the bytes before it

    std::string tag_text() const { return std::string(tag, strnlen(tag, sizeof tag)); }
};

// A third of a `Frame`: there is an ACK for each chunk, and chunks may be small.
struct ShortFrame {
    uint32_t magic;
    uint16_t type, lane;
    uint64_t offset, message;
    uint32_t reserved;
    uint32_t sum;  // of the bytes before it

    Frame frame() const {
        Frame made{};
        made.type = type, made.lane = lane, made.offset = offset, made.message = message;
        return made;
    }
};
static_assert(sizeof(Frame) == 96 && sizeof(ShortFrame) == 32, "the wire format");

inline bool is_short(uint16_t type) { return type != DATA && type != BYE; }

// One step of CRC-32C; `library.py` compiles for processors that have an instruction for it.
inline uint32_t crc_step(uint32_t crc, uint64_t word) {
#if defined(__SSE4_2__)
    return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
#elif defined(__ARM_FEATURE_CRC32)
    return __crc32cd(crc, word);
#else
    for (int byte = 0; byte < 8; byte++, word >>= 8) {
        crc ^= word & 0xff;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return crc;
#endif
}

inline uint64_t word_at(const char *data, size_t index) {
    uint64_t word;
    memcpy(&word, data + 8 * index, 8);
    return word;
}

// The checksum of a chunk: three interleaved CRC-32C over its thirds (a single one is bound by the
// instruction's latency) and one over the rest, combined by a fourth.
inline uint32_t checksum(const char *data, size_t length) {
    uint32_t a = ~0u, b = ~0u, c = ~0u, sum = ~static_cast<uint32_t>(length);
    size_t third = length / 24;
    for (size_t i = 0; i < third; i++) {
        a = crc_step(a, word_at(data, i));
        b = crc_step(b, word_at(data, third + i));
        c = crc_step(c, word_at(data, 2 * third + i));
    }
    char rest[24] = {};
    if (length) memcpy(rest, data + 24 * third, length - 24 * third);
    for (uint64_t word : {word_at(rest, 0), word_at(rest, 1), word_at(rest, 2), uint64_t{a} << 32 | b, uint64_t{c}})
        sum = crc_step(sum, word);
    return sum;
}

template <class Sealed>
void seal(Sealed &frame) {
    frame.magic = MAGIC;
    frame.sum = checksum(reinterpret_cast<const char *>(&frame), offsetof(Sealed, sum));
}

template <class Sealed>
bool sealed(const Sealed &frame) {
    return frame.magic == MAGIC &&
           frame.sum == checksum(reinterpret_cast<const char *>(&frame), offsetof(Sealed, sum));
}

}  // namespace weft
