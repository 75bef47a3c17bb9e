// The C call. `unisono run -n 2 PROGRAM` starts the ranks. Without a launcher start each of them by hand with
// PROGRAM RANK RANKS FOLDER: they then meet by files in an empty folder, through a callback.
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "unisono/unisono.h"

struct meeting {
  const char* folder;
  int rank, ranks, round;
};

// Each rank writes a file for each round, under its final name only when the file is whole. Returns 0.
static int all_gather(void* user, const void* mine, size_t bytes, void* all) {
  struct meeting* at = user;
  char whole[512], part[520];
  snprintf(whole, sizeof whole, "%s/%d.%d", at->folder, at->round, at->rank);
  snprintf(part, sizeof part, "%s.part", whole);
  FILE* file = fopen(part, "wb");
  if (!file) return 1;
  const size_t written = fwrite(mine, 1, bytes, file);
  if (fclose(file) != 0 || written != bytes || rename(part, whole) != 0) return 2;
  for (int rank = 0; rank < at->ranks; ++rank) {
    snprintf(whole, sizeof whole, "%s/%d.%d", at->folder, at->round, rank);
    const time_t begin = time(NULL);
    while (!(file = fopen(whole, "rb"))) {
      if (time(NULL) - begin > 30) return 3;  // seconds
      nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    const size_t got = fread((char*)all + (size_t)rank * bytes, 1, bytes, file);
    fclose(file);
    if (got != bytes) return 4;
  }
  ++at->round;
  return 0;
}

static int fail(unisono_comm* comm) {
  fprintf(stderr, "%s\n", unisono_error_text());
  unisono_free(comm);
  return 1;
}

int main(int argc, char** argv) {
  unisono_comm* comm = NULL;
  if (argc == 4) {
    struct meeting at = {.folder = argv[3], .rank = atoi(argv[1]), .ranks = atoi(argv[2])};
    const unisono_bootstrap bootstrap = {.size = sizeof bootstrap,
                                         .rank = at.rank,
                                         .num_ranks = at.ranks,
                                         .all_gather = all_gather,
                                         .user = &at};
    if (unisono_init_by(&bootstrap, NULL, &comm)) return fail(comm);
  } else if (unisono_init(NULL, &comm)) {
    return fail(comm);
  }
  const int rank = unisono_rank(comm), ranks = unisono_size(comm);

  enum { COUNT = 1000 };
  float mine[COUNT], sums[COUNT];
  for (int i = 0; i < COUNT; ++i) mine[i] = (float)(rank + 1);
  const unisono_call call = {
      .size = sizeof call, .in = mine, .out = sums, .count = COUNT, .dtype = UNISONO_F32, .op = UNISONO_SUM};
  if (unisono_run(comm, UNISONO_ALL_REDUCE, &call)) return fail(comm);
  printf("the sum is %g on rank %d of %d\n", sums[0], rank, ranks);
  unisono_free(comm);
  return sums[COUNT - 1] == (float)(ranks * (ranks + 1) / 2) ? 0 : 1;
}
