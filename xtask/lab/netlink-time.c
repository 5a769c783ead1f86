// SPDX-License-Identifier: Apache-2.0 OR MIT
// A library to preload: how much time a daemon spends in system calls on netlink sockets. A kernel
// serves a request within the call that sends it, and fills a listing within the calls that read it,
// so this is the kernel's part of what a daemon does with SAs, policies and routes.
//
// Only programs that NETLINK_TIME_OF names (separated by spaces) are counted, into files
// NETLINK_TIME.PID: "CALLS NANOSECONDS", two 64-bit numbers in host order that grow while the
// program runs.
//
// cc -shared -fPIC -O2 -o netlink-time.so netlink-time.c -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static struct counters {
  _Atomic uint64_t calls, nanoseconds;
} * counters;

// Whether a descriptor is a netlink socket: 1 yes, 2 no, 0 unknown.
static _Atomic unsigned char known[1024];

__attribute__((constructor)) static void begin(void) {
  const char *programs = getenv("NETLINK_TIME_OF"), *path = getenv("NETLINK_TIME");
  char name[4096], *list, *rest = NULL;
  int counted = 0;

  if (!programs || !path || !(list = strdup(programs)))
    return;
  for (char *word = strtok_r(list, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
    counted |= !strcmp(word, program_invocation_short_name);
  free(list);
  if (!counted)
    return;
  snprintf(name, sizeof name, "%s.%d", path, getpid());
  int file = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0)
    return;
  if (!ftruncate(file, sizeof *counters)) {
    void *map = mmap(NULL, sizeof *counters, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map != MAP_FAILED)
      counters = map;
  }
  close(file);
}

static int is_netlink(int fd) {
  int domain = 0, error = errno;
  socklen_t length = sizeof domain;

  if (!counters || fd < 0 || fd >= (int)sizeof known)
    return 0;
  if (!known[fd]) {
    int netlink = !getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) && domain == AF_NETLINK;
    known[fd] = netlink ? 1 : 2;
  }
  errno = error;
  return known[fd] == 1;
}

static uint64_t now(void) {
  struct timespec time;
  // Of this thread, so that waiting does not count.
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

#define COUNTED(result, name, parameters, arguments)                                              \
  result name parameters {                                                                        \
    static result(*real) parameters;                                                              \
    if (!real)                                                                                    \
      real = (result(*) parameters)dlsym(RTLD_NEXT, #name);                                       \
    if (!is_netlink(fd))                                                                          \
      return real arguments;                                                                      \
    uint64_t begun = now();                                                                       \
    result done = real arguments;                                                                 \
    int error = errno;                                                                            \
    counters->nanoseconds += now() - begun;                                                       \
    counters->calls++;                                                                            \
    errno = error;                                                                                \
    return done;                                                                                  \
  }

COUNTED(ssize_t, send, (int fd, const void *data, size_t length, int flags),
        (fd, data, length, flags))
COUNTED(ssize_t, sendto,
        (int fd, const void *data, size_t length, int flags, const struct sockaddr *to,
         socklen_t to_length),
        (fd, data, length, flags, to, to_length))
COUNTED(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
COUNTED(ssize_t, recv, (int fd, void *data, size_t length, int flags), (fd, data, length, flags))
COUNTED(ssize_t, recvfrom,
        (int fd, void *data, size_t length, int flags, struct sockaddr *from,
         socklen_t *from_length),
        (fd, data, length, flags, from, from_length))
COUNTED(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags))

int close(int fd) {
  static int (*real)(int);
  if (!real)
    real = (int (*)(int))dlsym(RTLD_NEXT, "close");
  if (fd >= 0 && fd < (int)sizeof known)
    known[fd] = 0;
  return real(fd);
}
