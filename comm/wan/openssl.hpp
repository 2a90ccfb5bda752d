// The few functions of OpenSSL that the transport needs, found in the library at run time, so
// that no headers have to be installed. Their signatures are those of OpenSSL 1.1.1 and 3.
#pragma once
#include <dlfcn.h>
#include <sys/random.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace weft {

struct Ssl;     // SSL
struct SslCtx;  // SSL_CTX
struct Bio;     // BIO

class OpenSsl;
const OpenSsl *&openssl_place();

class OpenSsl {
public:
    using PskClient = unsigned (*)(Ssl *, const char *, char *, unsigned, unsigned char *, unsigned);
    using PskServer = unsigned (*)(Ssl *, const char *, unsigned char *, unsigned);

    OpenSsl(const std::string &crypto, const std::string &ssl) : libraries_{open(crypto), open(ssl)} {}

private:
    void *libraries_[2];  // before the functions, which are found in them

    // A function of either library, of whatever signature it is declared with.
    struct Found {
        void *symbol;

        template <class Signature>
        operator Signature *() const {
            return reinterpret_cast<Signature *>(symbol);
        }
    };

    Found find(const char *name) const {
        for (void *library : libraries_)
            if (void *symbol = dlsym(library, name)) return {symbol};
        throw std::runtime_error(std::string("OpenSSL lacks ") + name);
    }

public:
    unsigned char *(*HMAC)(const void *, const void *, int, const unsigned char *, size_t, unsigned char *,
                           unsigned *) = find("HMAC");
    const void *(*EVP_sha256)() = find("EVP_sha256");
    int (*CRYPTO_memcmp)(const void *, const void *, size_t) = find("CRYPTO_memcmp");
    void (*ERR_clear_error)() = find("ERR_clear_error");
    Bio *(*BIO_new)(const void *) = find("BIO_new");
    void *(*BIO_meth_new)(int, const char *) = find("BIO_meth_new");
    int (*BIO_meth_set_write)(void *, int (*)(Bio *, const char *, int)) = find("BIO_meth_set_write");
    int (*BIO_meth_set_read)(void *, int (*)(Bio *, char *, int)) = find("BIO_meth_set_read");
    int (*BIO_meth_set_ctrl)(void *, long (*)(Bio *, int, long, void *)) = find("BIO_meth_set_ctrl");
    void (*BIO_set_data)(Bio *, void *) = find("BIO_set_data");
    void *(*BIO_get_data)(Bio *) = find("BIO_get_data");
    void (*BIO_set_init)(Bio *, int) = find("BIO_set_init");
    void (*BIO_set_flags)(Bio *, int) = find("BIO_set_flags");
    void (*BIO_clear_flags)(Bio *, int) = find("BIO_clear_flags");
    const void *(*TLS_method)() = find("TLS_method");
    SslCtx *(*SSL_CTX_new)(const void *) = find("SSL_CTX_new");
    void (*SSL_CTX_free)(SslCtx *) = find("SSL_CTX_free");
    long (*SSL_CTX_ctrl)(SslCtx *, int, long, void *) = find("SSL_CTX_ctrl");
    void (*SSL_CTX_set_default_read_buffer_len)(SslCtx *, size_t) = find("SSL_CTX_set_default_read_buffer_len");
    int (*SSL_CTX_set_ciphersuites)(SslCtx *, const char *) = find("SSL_CTX_set_ciphersuites");
    void (*SSL_CTX_set_psk_client_callback)(SslCtx *, PskClient) = find("SSL_CTX_set_psk_client_callback");
    void (*SSL_CTX_set_psk_server_callback)(SslCtx *, PskServer) = find("SSL_CTX_set_psk_server_callback");
    int (*SSL_CTX_set_num_tickets)(SslCtx *, size_t) = find("SSL_CTX_set_num_tickets");
    Ssl *(*SSL_new)(SslCtx *) = find("SSL_new");
    void (*SSL_free)(Ssl *) = find("SSL_free");
    void (*SSL_set_bio)(Ssl *, Bio *, Bio *) = find("SSL_set_bio");
    int (*SSL_set_ex_data)(Ssl *, int, void *) = find("SSL_set_ex_data");
    void *(*SSL_get_ex_data)(const Ssl *, int) = find("SSL_get_ex_data");
    void (*SSL_set_connect_state)(Ssl *) = find("SSL_set_connect_state");
    void (*SSL_set_accept_state)(Ssl *) = find("SSL_set_accept_state");
    int (*SSL_do_handshake)(Ssl *) = find("SSL_do_handshake");
    int (*SSL_read)(Ssl *, void *, int) = find("SSL_read");
    int (*SSL_write)(Ssl *, const void *, int) = find("SSL_write");
    int (*SSL_get_error)(const Ssl *, int) = find("SSL_get_error");

    enum { WANT_READ = 2, ZERO_RETURN = 6 };  // SSL_ERROR_*

    // A BIO that hands what TLS writes to `owner->encrypted(..)`, and has what it reads from
    // `owner->receive(..)`: how many bytes, 0 at the end, and less where there are none now.
    template <class Owner>
    Bio *over(Owner *owner) const {
        static void *method = [this] {
            enum { SOURCE_SINK = 0x400, OURS = 120, FLUSH = 11 };
            void *made = BIO_meth_new(SOURCE_SINK | OURS, "weft");
            BIO_meth_set_write(made, [](Bio *bio, const char *data, int length) {
                owner_of<Owner>(bio)->encrypted(data, length);
                return length;
            });
            BIO_meth_set_read(made, [](Bio *bio, char *data, int length) {
                enum { READ = 1, SHOULD_RETRY = 8 };
                openssl_place()->BIO_clear_flags(bio, READ | SHOULD_RETRY);
                int done = owner_of<Owner>(bio)->receive(data, length);
                if (done < 0) openssl_place()->BIO_set_flags(bio, READ | SHOULD_RETRY);
                return done;
            });
            BIO_meth_set_ctrl(made, [](Bio *, int what, long, void *) -> long { return what == FLUSH; });
            return made;
        }();
        Bio *bio = BIO_new(method);
        BIO_set_data(bio, owner);
        BIO_set_init(bio, 1);
        return bio;
    }

    // A context for TLS 1.3 that knows its peers by the key they share: no certificates.
    SslCtx *context(PskClient client, PskServer server) const {
        enum { CTRL_MODE = 33, READ_AHEAD = 41, SET_MIN_PROTO = 123, MOVING_BUFFER = 2, TLS_1_3 = 0x0304 };
        SslCtx *made = SSL_CTX_new(TLS_method());
        if (!made || !SSL_CTX_ctrl(made, SET_MIN_PROTO, TLS_1_3, nullptr) ||
            !SSL_CTX_set_ciphersuites(made, "TLS_AES_128_GCM_SHA256"))  // a shared key means its hash
            throw std::runtime_error("OpenSSL has no TLS 1.3");
        SSL_CTX_ctrl(made, CTRL_MODE, MOVING_BUFFER, nullptr);
        SSL_CTX_ctrl(made, READ_AHEAD, 1, nullptr);  // else each record of 16 kB is two calls of the kernel
        SSL_CTX_set_default_read_buffer_len(made, READ_BUFFER);
        SSL_CTX_set_num_tickets(made, 0);
        SSL_CTX_set_psk_client_callback(made, client);
        SSL_CTX_set_psk_server_callback(made, server);
        return made;
    }

private:
    static constexpr size_t READ_BUFFER = 128 << 10;  // of each connection

    template <class Owner>
    static Owner *owner_of(Bio *bio) {
        return static_cast<Owner *>(openssl_place()->BIO_get_data(bio));
    }

    static void *open(const std::string &name) {
        void *library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) throw std::runtime_error(dlerror());
        return library;
    }
};

// The library, once `load_openssl` has found it. Never unloaded: a thread may outlive `main`.
inline const OpenSsl *&openssl_place() {
    static const OpenSsl *place = nullptr;
    return place;
}
inline const OpenSsl &openssl() { return *openssl_place(); }
inline void load_openssl(const std::string &crypto, const std::string &ssl) {
    if (!openssl_place()) openssl_place() = new OpenSsl(crypto, ssl);
}

inline void fill_random(void *target, size_t length) {
    if (getrandom(target, length, 0) != static_cast<ssize_t>(length)) throw std::runtime_error("getrandom failed");
}

}  // namespace weft
