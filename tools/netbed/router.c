/* The line of a netbed: moves packets between nodes' TUN devices at each node's rate, after
 * each pair of sites' delay.
 *
 * One thread. Every node is an anonymous network namespace, held by a descriptor of this
 * process and by nothing else: when the process ends, however it ends, the kernel takes the
 * namespaces, devices and routes away.
 *
 * Reads its topology from standard input, then answers commands on an abstract Unix socket.
 * Standard input stays open: when it closes, the owner is gone and the bed comes down.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_NODES = 64, MAX_SITES = 16, MAX_RULES = 64, MAX_MTU = 65535, BATCH = 32 };

typedef struct packet {
    int64_t due_ns;
    uint64_t order;
    uint32_t length;
    uint16_t to;
    struct packet *next;
    unsigned char data[];
} packet;

typedef struct {
    char name[32];
    int site, host;        /* address 10.77.site.host */
    int netns, tun;        /* descriptors */
    double rate_bps;       /* uplink */
    int64_t free_at_ns;    /* when the uplink has sent what it holds */
    int64_t last_due_ns[MAX_SITES];
    uint64_t sent_bytes, sent_packets, queue_drops, fault_drops;
} node;

typedef struct {
    char name[32];
    int netns; /* holds the site's bridge */
} site;

typedef enum { CUT, FLAP, SLOW, DROP, FLIP } fault_kind;
static const char *const FAULT_NAMES[] = {"cut", "flap", "slow", "drop", "flip"};

typedef struct {
    fault_kind kind;
    uint64_t from, to; /* sets of nodes */
    int64_t start_ns, end_ns;
    double value; /* FLAP: seconds of a phase; SLOW: divisor; DROP: share; FLIP: packets left */
} rule;

static char bed_name[64];
static int mtu;
static int64_t queue_ns;
static node nodes[MAX_NODES];
static site sites[MAX_SITES];
static int num_nodes, num_sites, num_rules;
static int64_t delay_ns[MAX_SITES][MAX_SITES], jitter_ns[MAX_SITES][MAX_SITES];
static int by_address[256][256];
static rule rules[MAX_RULES];
static packet **heap, *spare;
static size_t heap_size, heap_room;
static uint64_t arrivals;
static int64_t worst_lag_ns;
static uint64_t random_state = 88172645463325252u;
static volatile sig_atomic_t stopping;

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static double random_share(void) { /* in [0, 1) */
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (random_state >> 11) * (1.0 / 9007199254740992.0);
}

/* ---- packets on their way, ordered by due time ---- */

static int before(const packet *a, const packet *b) {
    return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : a->order < b->order;
}

static void heap_push(packet *p) {
    if (heap_size == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 1024;
        heap = realloc(heap, heap_room * sizeof *heap);
        if (!heap) fail("out of memory");
    }
    size_t i = heap_size++;
    for (; i && before(p, heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = p;
}

static packet *heap_pop(void) {
    packet *top = heap[0], *last = heap[--heap_size];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < heap_size; i = child) {
        if (child + 1 < heap_size && before(heap[child + 1], heap[child])) child++;
        if (!before(heap[child], last)) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return top;
}

static packet *take_packet(void) {
    packet *p = spare;
    if (p) spare = p->next;
    else if (!(p = malloc(sizeof *p + mtu + 64))) fail("out of memory");
    return p;
}

static void give_packet(packet *p) {
    p->next = spare;
    spare = p;
}

/* ---- faults ---- */

/* Flips one byte in the middle of a TCP payload, and repairs the checksum, so that the
 * receiver's kernel believes the packet. Returns whether there was a payload. */
static int flip_payload(unsigned char *ip, uint32_t length) {
    uint32_t ip_header = (ip[0] & 15) * 4;
    if (length < ip_header + 20 || ip[9] != 6) return 0;
    unsigned char *tcp = ip + ip_header;
    uint32_t tcp_length = length - ip_header, tcp_header = (tcp[12] >> 4) * 4;
    if (tcp_length < tcp_header + 2) return 0;
    uint32_t at = (tcp_header + (tcp_length - tcp_header) / 2) & ~1u;
    uint16_t old_word = tcp[at] << 8 | tcp[at + 1];
    tcp[at] ^= 0x10;
    uint16_t new_word = tcp[at] << 8 | tcp[at + 1];
    uint32_t sum = (uint16_t) ~(tcp[16] << 8 | tcp[17]); /* RFC 1624, equation 3 */
    sum += (uint16_t)~old_word + new_word;
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    tcp[16] = (uint16_t)~sum >> 8;
    tcp[17] = ~sum & 0xff;
    return 1;
}

static void drop_ended_rules(int64_t now) {
    int kept = 0;
    for (int i = 0; i < num_rules; i++)
        if (now < rules[i].end_ns && !(rules[i].kind == FLIP && rules[i].value < 1)) rules[kept++] = rules[i];
    num_rules = kept;
}

/* Applies the rules to a packet; returns whether it survives, and the uplink's rate. */
static int survives(packet *p, int from, int64_t now, double *rate_bps) {
    for (int i = 0; i < num_rules; i++) {
        rule *r = &rules[i];
        if (now >= r->end_ns || !(r->from >> from & 1) || !(r->to >> p->to & 1)) continue;
        switch (r->kind) {
        case CUT:
            return 0;
        case FLAP:
            if ((int64_t)((now - r->start_ns) / (r->value * 1e9)) % 2 == 0) return 0;
            break;
        case SLOW:
            *rate_bps /= r->value;
            break;
        case DROP:
            if (random_share() < r->value) return 0;
            break;
        case FLIP:
            if (r->value >= 1 && flip_payload(p->data, p->length)) r->value -= 1;
            break;
        }
    }
    return 1;
}

/* ---- the line ---- */

static void enter_line(int from, packet *p, int64_t now) {
    node *source = &nodes[from];
    const unsigned char *address = p->data + 16;
    int to = p->length >= 20 && p->data[0] >> 4 == 4 && address[0] == 10 && address[1] == 77
                 ? by_address[address[2]][address[3]] - 1
                 : -1;
    double rate_bps = source->rate_bps;
    if (to < 0) {
        give_packet(p);
        return;
    }
    p->to = to;
    if (!survives(p, from, now, &rate_bps)) {
        source->fault_drops++;
        give_packet(p);
        return;
    }
    int64_t start = source->free_at_ns > now ? source->free_at_ns : now;
    if (start - now > queue_ns) {
        source->queue_drops++;
        give_packet(p);
        return;
    }
    source->free_at_ns = start + (int64_t)(p->length * 8e9 / rate_bps);
    int far = nodes[to].site;
    p->due_ns = source->free_at_ns + delay_ns[source->site][far];
    p->due_ns += (int64_t)((2 * random_share() - 1) * jitter_ns[source->site][far]);
    if (p->due_ns < source->last_due_ns[far]) p->due_ns = source->last_due_ns[far]; /* lines keep order */
    source->last_due_ns[far] = p->due_ns;
    p->order = arrivals++;
    source->sent_bytes += p->length;
    source->sent_packets++;
    heap_push(p);
}

static void read_node(int from) {
    for (int i = 0; i < BATCH; i++) {
        packet *p = take_packet();
        ssize_t length = read(nodes[from].tun, p->data, mtu + 64);
        if (length <= 0) {
            give_packet(p);
            return;
        }
        p->length = length;
        enter_line(from, p, now_ns());
    }
}

static void deliver_due(void) {
    int64_t now = now_ns();
    while (heap_size && heap[0]->due_ns <= now) {
        packet *p = heap_pop();
        if (now - p->due_ns > worst_lag_ns) worst_lag_ns = now - p->due_ns;
        if (write(nodes[p->to].tun, p->data, p->length) < 0) nodes[p->to].queue_drops++;
        give_packet(p);
    }
}

/* ---- namespaces ---- */

static int new_netns(void) {
    if (unshare(CLONE_NEWNET)) fail("cannot make a network namespace (root is needed)");
    int fd = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("/proc/thread-self/ns/net");
    return fd;
}

static int new_tun(void) {
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) fail("/dev/net/tun");
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strcpy(request.ifr_name, "wan0");
    if (ioctl(fd, TUNSETIFF, &request)) fail("cannot make a TUN device");
    return fd;
}

/* Ends every process that still runs in the bed, so that nothing outlives it. */
static void kill_inhabitants(void) {
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    while (proc && (entry = readdir(proc))) {
        char path[300];
        struct stat theirs, ours;
        int pid = atoi(entry->d_name);
        snprintf(path, sizeof path, "/proc/%s/ns/net", entry->d_name);
        if (pid <= 0 || pid == getpid() || stat(path, &theirs)) continue;
        for (int i = 0; i < num_nodes + num_sites; i++) {
            int fd = i < num_nodes ? nodes[i].netns : sites[i - num_nodes].netns;
            if (!fstat(fd, &ours) && ours.st_ino == theirs.st_ino && ours.st_dev == theirs.st_dev) kill(pid, SIGKILL);
        }
    }
    if (proc) closedir(proc);
}

/* Topology, one item a line:
 *   bed NAME MTU QUEUE_NS | site NAME | node NAME SITE HOST RATE_BPS |
 *   path SITE SITE DELAY_NS JITTER_NS | end
 */
static void read_topology(void) {
    char line[256];
    int a, b, home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (home < 0) fail("/proc/self/ns/net");
    while (fgets(line, sizeof line, stdin) && strncmp(line, "end", 3)) {
        node *n = &nodes[num_nodes];
        int64_t delay, jitter;
        if (sscanf(line, "bed %63s %d %ld", bed_name, &mtu, &queue_ns) == 3) continue;
        if (num_sites < MAX_SITES && sscanf(line, "site %31s", sites[num_sites].name) == 1) {
            sites[num_sites++].netns = new_netns();
        } else if (num_nodes < MAX_NODES &&
                   sscanf(line, "node %31s %d %d %lf", n->name, &n->site, &n->host, &n->rate_bps) == 4) {
            n->netns = new_netns();
            n->tun = new_tun();
            by_address[n->site][n->host] = ++num_nodes;
        } else if (sscanf(line, "path %d %d %ld %ld", &a, &b, &delay, &jitter) == 4) {
            delay_ns[a][b] = delay_ns[b][a] = delay;
            jitter_ns[a][b] = jitter_ns[b][a] = jitter;
        } else {
            fprintf(stderr, "cannot read the topology at: %s", line);
            exit(1);
        }
    }
    if (setns(home, CLONE_NEWNET)) fail("cannot return to the first namespace");
    close(home);
}

/* ---- commands ---- */

#define CLIENT_NS 5000000000LL /* to say its command */

static int listen_control(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "weft-netbed-%s", bed_name);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, offsetof(struct sockaddr_un, sun_path) + 1 + length)) {
        if (errno == EADDRINUSE) fprintf(stderr, "a bed named %s is up already\n", bed_name);
        else perror("control socket");
        exit(1);
    }
    if (listen(fd, 8)) fail("control socket");
    return fd;
}

static size_t append(char *text, size_t used, size_t room, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int more = used < room ? vsnprintf(text + used, room - used, format, arguments) : 0;
    va_end(arguments);
    return used + (more > 0 ? more : 0);
}

static size_t write_status(char *text, size_t room) {
    int64_t now = now_ns();
    size_t used = append(text, 0, room, "bed %s %d %zu %ld\n", bed_name, getpid(), heap_size, worst_lag_ns);
    worst_lag_ns = 0;
    for (int i = 0; i < num_sites; i++)
        used = append(text, used, room, "site %s %d\n", sites[i].name, sites[i].netns);
    for (int i = 0; i < num_nodes; i++) {
        node *n = &nodes[i];
        used = append(text, used, room, "node %s %d %d %d %.0f %lu %lu %lu %lu\n", n->name, n->site, n->host, n->netns,
                      n->rate_bps, n->sent_bytes, n->sent_packets, n->queue_drops, n->fault_drops);
    }
    for (int i = 0; i < num_rules; i++)
        used = append(text, used, room, "fault %s %lx %lx %g %g\n", FAULT_NAMES[rules[i].kind], rules[i].from,
                      rules[i].to, rules[i].value, (rules[i].end_ns - now) * 1e-9);
    return used < room ? used : room - 1;
}

static const char *add_rule(const char *command) {
    char name[16];
    double seconds;
    int64_t now = now_ns();
    rule r = {.start_ns = now};
    drop_ended_rules(now);
    if (num_rules == MAX_RULES) return "too many faults at once\n";
    if (sscanf(command, "fault %15s %lx %lx %lf %lf", name, &r.from, &r.to, &r.value, &seconds) != 5)
        return "cannot read the fault\n";
    r.end_ns = now + (int64_t)(seconds * 1e9);
    for (r.kind = CUT; r.kind <= FLIP; r.kind++)
        if (!strcmp(name, FAULT_NAMES[r.kind])) {
            rules[num_rules++] = r;
            return "ok\n";
        }
    return "there is no such fault\n";
}

/* Answers the command on a connection of the same user, and closes it. */
static void answer(int fd, int *attached) {
    static char reply[16384];
    char command[256];
    struct ucred peer;
    socklen_t size = sizeof peer;
    ssize_t length = recv(fd, command, sizeof command - 1, 0);
    if (length > 0 && !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) && peer.uid == geteuid()) {
        command[length] = 0;
        strcpy(reply, "ok\n");
        if (!strncmp(command, "fault ", 6)) strcpy(reply, add_rule(command));
        else if (!strcmp(command, "heal")) num_rules = 0;
        else if (!strcmp(command, "status")) drop_ended_rules(now_ns()), write_status(reply, sizeof reply);
        else if (!strcmp(command, "detach")) *attached = 0;
        else if (!strcmp(command, "stop")) stopping = 1;
        else strcpy(reply, "there is no such command\n");
        if (stopping) kill_inhabitants();
        send(fd, reply, strlen(reply), MSG_NOSIGNAL);
    }
    close(fd);
}

static void on_signal(int number) {
    (void)number;
    stopping = 1;
}

int main(void) {
    struct pollfd polled[MAX_NODES + 2];
    int attached = 1;
    setsid();
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1UL);
    setpriority(PRIO_PROCESS, 0, -10); /* it stands for hardware */
    read_topology();
    /* One client at a time, which the line does not wait for: on a busy machine a command comes late. */
    int control = listen_control(), client = -1;
    int64_t client_ns = 0;
    puts("ready");
    fflush(stdout);
    while (!stopping) {
        for (int i = 0; i < num_nodes; i++) polled[i] = (struct pollfd){.fd = nodes[i].tun, .events = POLLIN};
        polled[num_nodes] = (struct pollfd){.fd = client < 0 ? control : client, .events = POLLIN};
        polled[num_nodes + 1] = (struct pollfd){.fd = attached ? 0 : -1};
        struct timespec wait, *until = NULL;
        if (heap_size) {
            int64_t left = heap[0]->due_ns - now_ns();
            if (left < 0) left = 0;
            wait = (struct timespec){.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
            until = &wait;
        }
        if (ppoll(polled, num_nodes + 2, until, NULL) < 0 && errno != EINTR) fail("poll");
        deliver_due();
        for (int i = 0; i < num_nodes; i++)
            if (polled[i].revents & POLLIN) {
                read_node(i);
                deliver_due();
            }
        if (client < 0 && polled[num_nodes].revents) {
            client = accept4(control, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
            client_ns = now_ns();
        } else if (polled[num_nodes].revents) {
            answer(client, &attached);
            client = -1;
        } else if (client >= 0 && now_ns() - client_ns > CLIENT_NS) {
            close(client);
            client = -1;
        }
        if (polled[num_nodes + 1].revents & (POLLHUP | POLLERR)) stopping = 1;
    }
    kill_inhabitants();
    return 0;
}
