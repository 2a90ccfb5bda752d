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

    OpenSsl(const std::string &crypto, const std::string &ssl) {
        void *library = open(crypto);
        find(library, "HMAC", HMAC);
        find(library, "EVP_sha256", EVP_sha256);
        find(library, "CRYPTO_memcmp", CRYPTO_memcmp);
        find(library, "ERR_clear_error", ERR_clear_error);
        find(library, "BIO_new", BIO_new);
        find(library, "BIO_meth_new", BIO_meth_new);
        find(library, "BIO_meth_set_write", BIO_meth_set_write);
        find(library, "BIO_meth_set_read", BIO_meth_set_read);
        find(library, "BIO_meth_set_ctrl", BIO_meth_set_ctrl);
        find(library, "BIO_set_data", BIO_set_data);
        find(library, "BIO_get_data", BIO_get_data);
        find(library, "BIO_set_init", BIO_set_init);
        find(library, "BIO_set_flags", BIO_set_flags);
        find(library, "BIO_clear_flags", BIO_clear_flags);
        library = open(ssl);
        find(library, "TLS_method", TLS_method);
        find(library, "SSL_CTX_new", SSL_CTX_new);
        find(library, "SSL_CTX_free", SSL_CTX_free);
        find(library, "SSL_CTX_ctrl", SSL_CTX_ctrl);
        find(library, "SSL_CTX_set_default_read_buffer_len", SSL_CTX_set_default_read_buffer_len);
        find(library, "SSL_CTX_set_ciphersuites", SSL_CTX_set_ciphersuites);
        find(library, "SSL_CTX_set_psk_client_callback", SSL_CTX_set_psk_client_callback);
        find(library, "SSL_CTX_set_psk_server_callback", SSL_CTX_set_psk_server_callback);
        find(library, "SSL_CTX_set_num_tickets", SSL_CTX_set_num_tickets);
        find(library, "SSL_new", SSL_new);
        find(library, "SSL_free", SSL_free);
        find(library, "SSL_set_bio", SSL_set_bio);
        find(library, "SSL_set_ex_data", SSL_set_ex_data);
        find(library, "SSL_get_ex_data", SSL_get_ex_data);
        find(library, "SSL_set_connect_state", SSL_set_connect_state);
        find(library, "SSL_set_accept_state", SSL_set_accept_state);
        find(library, "SSL_do_handshake", SSL_do_handshake);
        find(library, "SSL_read", SSL_read);
        find(library, "SSL_write", SSL_write);
        find(library, "SSL_get_error", SSL_get_error);
    }

    unsigned char *(*HMAC)(const void *, const void *, int, const unsigned char *, size_t, unsigned char *, unsigned *);
    const void *(*EVP_sha256)();
    int (*CRYPTO_memcmp)(const void *, const void *, size_t);
    void (*ERR_clear_error)();
    Bio *(*BIO_new)(const void *);
    void *(*BIO_meth_new)(int, const char *);
    int (*BIO_meth_set_write)(void *, int (*)(Bio *, const char *, int));
    int (*BIO_meth_set_read)(void *, int (*)(Bio *, char *, int));
    int (*BIO_meth_set_ctrl)(void *, long (*)(Bio *, int, long, void *));
    void (*BIO_set_data)(Bio *, void *);
    void *(*BIO_get_data)(Bio *);
    void (*BIO_set_init)(Bio *, int);
    void (*BIO_set_flags)(Bio *, int);
    void (*BIO_clear_flags)(Bio *, int);
    const void *(*TLS_method)();
    SslCtx *(*SSL_CTX_new)(const void *);
    void (*SSL_CTX_free)(SslCtx *);
    long (*SSL_CTX_ctrl)(SslCtx *, int, long, void *);
    void (*SSL_CTX_set_default_read_buffer_len)(SslCtx *, size_t);
    int (*SSL_CTX_set_ciphersuites)(SslCtx *, const char *);
    void (*SSL_CTX_set_psk_client_callback)(SslCtx *, PskClient);
    void (*SSL_CTX_set_psk_server_callback)(SslCtx *, PskServer);
    int (*SSL_CTX_set_num_tickets)(SslCtx *, size_t);
    Ssl *(*SSL_new)(SslCtx *);
    void (*SSL_free)(Ssl *);
    void (*SSL_set_bio)(Ssl *, Bio *, Bio *);
    int (*SSL_set_ex_data)(Ssl *, int, void *);
    void *(*SSL_get_ex_data)(const Ssl *, int);
    void (*SSL_set_connect_state)(Ssl *);
    void (*SSL_set_accept_state)(Ssl *);
    int (*SSL_do_handshake)(Ssl *);
    int (*SSL_read)(Ssl *, void *, int);
    int (*SSL_write)(Ssl *, const void *, int);
    int (*SSL_get_error)(const Ssl *, int);

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

    template <class Function>
    static void find(void *library, const char *name, Function &function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (!function) throw std::runtime_error(std::string("OpenSSL lacks ") + name);
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
