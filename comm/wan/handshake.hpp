// Mutual authentication before any frame: HMAC-SHA256 challenge-response over a shared key. The
// connecting side proves itself first, so an unauthenticated peer learns random numbers only. All
// messages have a fixed size. `Job` identifies one attempt of a run: processes left over from an
// earlier attempt have the same key, and are refused.
//
//   connects                                  listens
//   Hello     job, from, to, nonce   ->
//                                      <-     Challenge   job, from, nonce
//   Proof     HMAC(key, "connects" ..) ->
//                                      <-     Proof       HMAC(key, "listens" ..)
#pragma once
#include <array>

#include "openssl.hpp"

namespace weft {

using Job = std::array<unsigned char, 16>;

struct Hello {
    char magic[8];
    Job job;
    uint32_t from, to;
    uint64_t session;  // of the endpoint; changes on a restart
    uint32_t slot, connections;
    uint32_t chunk_bytes, reserved;
    unsigned char random[32];
};
struct Challenge {
    char magic[8];
    Job job;
    uint32_t from, to;
    uint64_t session;
    uint32_t chunk_bytes, reserved;
    unsigned char random[32];
};
struct Proof {
    unsigned char mac[32];
};
static_assert(sizeof(Hello) == 88 && sizeof(Challenge) == 80 && sizeof(Proof) == 32, "the wire format");

constexpr char HELLO_MAGIC[8] = {'w', 'e', 'f', 't', 'w', 'a', 'n', '2'};

class Handshake {
public:
    Hello hello{};
    Challenge challenge{};

    void start(const Job &job, uint32_t from, uint32_t to, uint64_t session, uint32_t slot, uint32_t connections,
               uint32_t chunk) {
        hello = {{}, job, from, to, session, slot, connections, chunk, 0, {}};
        memcpy(hello.magic, HELLO_MAGIC, sizeof HELLO_MAGIC);
        fill_random(hello.random, sizeof hello.random);
    }

    void answer(const Job &job, uint32_t from, uint64_t session, uint32_t chunk) {
        challenge = {{}, job, from, hello.from, session, chunk, 0, {}};
        memcpy(challenge.magic, HELLO_MAGIC, sizeof HELLO_MAGIC);
        fill_random(challenge.random, sizeof challenge.random);
    }

    bool of_one_job() const { return hello.job == challenge.job; }

    Proof prove(const std::string &key, bool connects) const {
        std::string text = connects ? "connects" : "listens";
        text.append(reinterpret_cast<const char *>(&hello), sizeof hello);
        text.append(reinterpret_cast<const char *>(&challenge), sizeof challenge);
        Proof proof{};
        unsigned length = sizeof proof.mac;
        if (!openssl().HMAC(openssl().EVP_sha256(), key.data(), static_cast<int>(key.size()),
                      reinterpret_cast<const unsigned char *>(text.data()), text.size(), proof.mac, &length))
            throw std::runtime_error("HMAC failed");
        return proof;
    }

    bool proven(const std::string &key, bool connects, const Proof &given) const {
        Proof wanted = prove(key, connects);
        return openssl().CRYPTO_memcmp(wanted.mac, given.mac, sizeof wanted.mac) == 0;
    }
};

}  // namespace weft
