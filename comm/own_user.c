// A library's accept() that takes connections of this user's own processes only.
//
// Some libraries (gloo, NCCL, UCX) listen with a protocol that does not authenticate peers. This file redirects their
// calls of accept() and accept4() to functions that ask the kernel who owns the other end of a connection. The entries
// of a library's table of imported functions are replaced, as its loader filled them in.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <link.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CLOSED = -1, UNKNOWN = -2, ESTABLISHED = 1, MOST_ANSWER = 8192 };

static int one_host = 1;  // no rank is on another host

// Torch (gloo) and NCCL; ZeroMQ and UCX, by which vLLM's NIXL connector hands KV caches over.
static const char *const LIBRARIES[] = {"libtorch", "libnccl", "libzmq", "libuct", "libucs", NULL};

struct question {
  struct nlmsghdr header;
  struct inet_diag_req_v2 request;
};

union address {
  struct sockaddr any;
  struct sockaddr_in v4;
  struct sockaddr_in6 v6;
};

// Fill in one end of a connection; an IPv4 address in IPv6's clothes becomes IPv4, as the peer's socket has it.
static int put(const union address *address, uint32_t *where, uint16_t *port) {
  if (address->any.sa_family == AF_INET) {
    where[0] = address->v4.sin_addr.s_addr, *port = address->v4.sin_port;
    return AF_INET;
  }
  *port = address->v6.sin6_port;
  memcpy(where, &address->v6.sin6_addr, 16);
  if (!IN6_IS_ADDR_V4MAPPED(&address->v6.sin6_addr)) return AF_INET6;
  where[0] = where[3], where[1] = where[2] = where[3] = 0;
  return AF_INET;
}

// The user of the connected socket whose own address is `peer` and whose peer is `mine`, CLOSED if this host has none,
// UNKNOWN if the kernel does not answer.
static int64_t owner(const union address *peer, const union address *mine) {
  struct question question = {
      .header = {.nlmsg_len = sizeof question, .nlmsg_type = SOCK_DIAG_BY_FAMILY, .nlmsg_flags = NLM_F_REQUEST},
      .request = {.sdiag_protocol = IPPROTO_TCP,
                  .idiag_states = ~0u,
                  .id.idiag_cookie = {INET_DIAG_NOCOOKIE, INET_DIAG_NOCOOKIE}}};
  struct inet_diag_sockid *id = &question.request.id;
  int family = put(peer, id->idiag_src, &id->idiag_sport);
  put(mine, id->idiag_dst, &id->idiag_dport);
  question.request.sdiag_family = family;
  int kernel = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
  if (kernel < 0) return UNKNOWN;
  _Alignas(struct nlmsghdr) char answer[MOST_ANSWER];
  ssize_t got = -1;
  if (send(kernel, &question, sizeof question, 0) == sizeof question) got = recv(kernel, answer, sizeof answer, 0);
  close(kernel);
  struct nlmsghdr *header = (struct nlmsghdr *)answer;
  if (got < 0 || !NLMSG_OK(header, (size_t)got)) return UNKNOWN;
  if (header->nlmsg_type == NLMSG_ERROR)
    return ((struct nlmsgerr *)NLMSG_DATA(header))->error == -ENOENT ? CLOSED : UNKNOWN;
  if (header->nlmsg_type != SOCK_DIAG_BY_FAMILY) return UNKNOWN;
  struct inet_diag_msg *found = NLMSG_DATA(header);
  // A listener answers for a socket that is gone, and sockets that are being closed belong to root.
  return found->idiag_state == ESTABLISHED && found->id.idiag_dport == id->idiag_dport ? (int64_t)found->idiag_uid : CLOSED;
}

static int of_this_host(const union address *peer) {
  uint32_t wanted[4] = {0}, here[4];
  uint16_t port;
  int family = put(peer, wanted, &port), found = 0;
  if (family == AF_INET && (ntohl(wanted[0]) >> 24) == 127) return 1;
  struct ifaddrs *all = NULL;
  if (getifaddrs(&all)) return 1;
  for (struct ifaddrs *each = all; each; each = each->ifa_next) {
    if (!each->ifa_addr || each->ifa_addr->sa_family != family) continue;
    memset(here, 0, sizeof here);
    put((union address *)each->ifa_addr, here, &port);
    found |= !memcmp(here, wanted, sizeof here);
  }
  freeifaddrs(all);
  return found;
}

static int is_own(int end) {
  union address peer = {0}, mine = {0};
  socklen_t size = sizeof peer;
  if (getpeername(end, &peer.any, &size)) return 0;
  size = sizeof mine;
  if (getsockname(end, &mine.any, &size)) return 0;
  if (peer.any.sa_family != AF_INET && peer.any.sa_family != AF_INET6) return 1;
  int64_t user = owner(&peer, &mine);
  return user == (int64_t)geteuid() || (user == CLOSED && !one_host && !of_this_host(&peer));
}

static int accept4_own(int listener, struct sockaddr *address, socklen_t *size, int flags) {
  socklen_t room = size ? *size : 0;
  for (;;) {
    int end = accept4(listener, address, size, flags);
    if (end < 0 || is_own(end)) return end;
    close(end);
    if (size) *size = room;
    if (fcntl(listener, F_GETFL) & O_NONBLOCK) return errno = EAGAIN, -1;
  }
}

static int accept_own(int listener, struct sockaddr *address, socklen_t *size) {
  return accept4_own(listener, address, size, 0);
}

static int redirect(const struct dl_phdr_info *library, const ElfW(Rela) * entries, size_t bytes,
                    const ElfW(Sym) * symbols, const char *names) {
  int done = 0;
  long page = sysconf(_SC_PAGESIZE);
  for (size_t at = 0; entries && at < bytes / sizeof *entries; at++) {
    size_t symbol = sizeof(void *) == 8 ? ELF64_R_SYM(entries[at].r_info) : ELF32_R_SYM(entries[at].r_info);
    const char *name = names + symbols[symbol].st_name;
    void *to = NULL;
    if (symbol && !strcmp(name, "accept")) to = (void *)accept_own;
    if (symbol && !strcmp(name, "accept4")) to = (void *)accept4_own;
    if (!to) continue;
    void **slot = (void **)(library->dlpi_addr + entries[at].r_offset);
    void *start = (void *)((uintptr_t)slot & ~(uintptr_t)(page - 1));
    if (mprotect(start, (uintptr_t)(slot + 1) - (uintptr_t)start, PROT_READ | PROT_WRITE)) return done;
    *slot = to;
    done++;
  }
  return done;
}

static int visit(struct dl_phdr_info *library, size_t size, void *count) {
  (void)size;
  int is_named = 0;
  for (const char *const *each = LIBRARIES; library->dlpi_name && *each; each++)
    is_named |= strstr(library->dlpi_name, *each) != NULL;
  if (!is_named) return 0;
  const ElfW(Rela) *plt = NULL, *data = NULL;
  size_t plt_bytes = 0, data_bytes = 0;
  const ElfW(Sym) *symbols = NULL;
  const char *names = NULL;
  for (int at = 0; at < library->dlpi_phnum; at++) {
    if (library->dlpi_phdr[at].p_type != PT_DYNAMIC) continue;
    for (ElfW(Dyn) *each = (void *)(library->dlpi_addr + library->dlpi_phdr[at].p_vaddr); each->d_tag; each++) {
      if (each->d_tag == DT_JMPREL) plt = (void *)each->d_un.d_ptr;
      if (each->d_tag == DT_PLTRELSZ) plt_bytes = each->d_un.d_val;
      if (each->d_tag == DT_RELA) data = (void *)each->d_un.d_ptr;
      if (each->d_tag == DT_RELASZ) data_bytes = each->d_un.d_val;
      if (each->d_tag == DT_SYMTAB) symbols = (void *)each->d_un.d_ptr;
      if (each->d_tag == DT_STRTAB) names = (void *)each->d_un.d_ptr;
    }
  }
  if (!symbols || !names) return 0;
  *(int *)count += redirect(library, plt, plt_bytes, symbols, names);
  *(int *)count += redirect(library, data, data_bytes, symbols, names);
  return 0;
}

// Redirect what these libraries call; returns how many calls were found, and 0 if the kernel does not tell
// who owns a connection. It may be called again.
int weft_refuse_other_users(int all_ranks_here) {
  const union address nowhere = {.v4 = {.sin_family = AF_INET}};
  if (owner(&nowhere, &nowhere) == UNKNOWN) return 0;
  one_host = all_ranks_here;
  int count = 0;
  dl_iterate_phdr(visit, &count);
  return count;
}
