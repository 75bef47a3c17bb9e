// Unisono for C11, and for every language that calls C.
//
//   unisono_comm* comm = NULL;
//   if (unisono_init(NULL, &comm)) return fprintf(stderr, "%s\n", unisono_error_text()), 1;
//   unisono_call call = {.size = sizeof call, .in = x, .out = y, .count = n, .dtype = UNISONO_F32};
//   int status = unisono_run(comm, UNISONO_ALL_REDUCE, &call);
//   unisono_free(comm);
//
// communicator.hpp says what each call does: buffers, in-place forms, order, errors.
//
// Structs begin with their size, and 0 in a field means its default. A later version may append fields: the
// library takes structs of older headers, and of newer ones as long as the fields that it lacks are 0.
// Numbers of constants never change.
//
// Threads: calls of a communicator run one at a time, in the order in which they come, from any thread.
// unisono_failure, unisono_abort and unisono_close run at any time. One process may have many communicators.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "unisono/version.hpp"

#ifdef __cplusplus
extern "C" {
#endif

// Results of functions. After an error unisono_error_text says what to do.
enum unisono_status {
  UNISONO_OK = 0,
  UNISONO_ERROR_USAGE = 1,     // the call is wrong by itself; nothing has moved
  UNISONO_ERROR_MISMATCH = 2,  // the ranks' calls disagree
  UNISONO_ERROR_TIMEOUT = 3,   // a wait has passed the deadline
  UNISONO_ERROR_PEER_LOST = 4,
  UNISONO_ERROR_RESOURCE = 5,  // the system has refused memory, a file or a handle
  UNISONO_ERROR_OTHER = 6,
};

enum unisono_dtype {
  UNISONO_F32 = 0,
  UNISONO_F64 = 1,
  UNISONO_F16 = 2,
  UNISONO_BF16 = 3,
  UNISONO_I8 = 4,
  UNISONO_U8 = 5,
  UNISONO_I32 = 6,
  UNISONO_I64 = 7,
  UNISONO_F8E4M3 = 8,
  UNISONO_F8E5M2 = 9,
};

enum unisono_op {
  UNISONO_SUM = 0,
  UNISONO_PROD = 1,
  UNISONO_MIN = 2,
  UNISONO_MAX = 3,
  UNISONO_AVG = 4,
  UNISONO_BAND = 5,  // of bits: integers in host memory
  UNISONO_BOR = 6,
  UNISONO_BXOR = 7,
};

enum unisono_wire { UNISONO_WIRE_EXACT = 0, UNISONO_WIRE_FP8 = 1, UNISONO_WIRE_INT8 = 2 };

enum unisono_memory { UNISONO_HOST = 0, UNISONO_DEVICE = 1 };

// The fields of unisono_call that each uses besides memory, stream, algorithm and timeout_s.
enum unisono_collective {
  UNISONO_ALL_REDUCE = 0,        // in, out, count, dtype, op, wire, factor
  UNISONO_REDUCE = 1,            // in, out, count, dtype, op, root, factor
  UNISONO_BROADCAST = 2,         // in, out, count, dtype, root
  UNISONO_ALL_GATHER = 3,        // in, out, count of a block, dtype
  UNISONO_GATHER = 4,            // in, out, count of a block, dtype, root
  UNISONO_REDUCE_SCATTER = 5,    // in, out, count of a block, dtype, op, factor
  UNISONO_SCATTER = 6,           // in, out, count of a block, dtype, root
  UNISONO_ALL_TO_ALL = 7,        // in, out, count of a block, dtype
  UNISONO_ALL_TO_ALL_V = 8,      // in, out, dtype, send_counts, recv_counts
  UNISONO_SEND = 9,              // in, count, dtype, to, tagged, tag
  UNISONO_RECV = 10,             // out, count, dtype, from, tagged, tag, received
  UNISONO_SEND_RECV = 11,        // in, out, count, dtype, to, from
  UNISONO_BATCH_SEND_RECV = 12,  // sends, num_sends, receives, num_receives
  UNISONO_BARRIER = 13,          // none: the call may be null
};

// A message of UNISONO_BATCH_SEND_RECV. No data is null, also of an empty message.
typedef struct unisono_outgoing {
  const void* data;
  size_t bytes;
  int32_t to;
} unisono_outgoing;

typedef struct unisono_incoming {
  void* data;
  size_t bytes;
  int32_t from;
} unisono_incoming;

// `from` of a receive with a tag that takes a message of any rank.
enum { UNISONO_ANY_SOURCE = -1 };

// The message that a receive with a tag has taken.
typedef struct unisono_received {
  size_t bytes;
  int32_t source;  // the sender's rank
} unisono_received;

// One rank's part of a collective.
typedef struct unisono_call {
  size_t size;  // sizeof(unisono_call)
  const void* in;
  void* out;
  size_t count;               // elements
  int32_t dtype;              // unisono_dtype
  int32_t op;                 // unisono_op
  int32_t root;               // a rank
  int32_t memory;             // unisono_memory of `in` and `out`
  int32_t wire;               // unisono_wire
  int32_t to;                 // a rank
  int32_t from;               // a rank
  int32_t tagged;             // send, recv: 1 if the message has a tag, else 0
  void* stream;               // device memory: the cudaStream_t that the call is enqueued on
  const char* algorithm;      // null: the plan's choice
  const size_t* send_counts;  // elements, one for each rank
  const size_t* recv_counts;
  const unisono_outgoing* sends;
  size_t num_sends;
  const unisono_incoming* receives;
  size_t num_receives;
  double timeout_s;            // deadline of this call's waits, on host memory; 0: the communicator's
  unisono_received* received;  // null, or what unisono_run of a tagged recv writes
  int32_t tag;                 // 0 or more
  int32_t reserved;            // 0
  // Scales this rank's input before a sum of UNISONO_F32, F64, F16 or BF16 in host memory (premultiplied
  // sum). Ranks may differ in it. 0, as in a zeroed struct: none, as 1.
  double factor;
} unisono_call;

typedef struct unisono_options {
  size_t size;       // sizeof(unisono_options)
  double timeout_s;  // deadline of every wait; 0: UNISONO_TIMEOUT_S, else 30
  int32_t use_gpu;   // 1: this rank has a GPU, `device`; on every rank or on none
  int32_t device;    // CUDA ordinal
  int32_t check;     // 1: compare the ranks' calls first; 0: as UNISONO_CHECK says
  int32_t reserved;  // 0
  const char* node;  // name of this rank's node; null: UNISONO_NODE, else by the kernel's namespaces
} unisono_options;

// How ranks meet, if no `unisono run` has started them.
typedef struct unisono_bootstrap {
  size_t size;  // sizeof(unisono_bootstrap)
  int32_t rank;
  int32_t num_ranks;
  // Writes the `bytes` bytes that each rank gives as `mine` to `all`, in rank order. Collective; `bytes` is
  // the same on every rank. Called by unisono_init_by alone, in the caller's thread. MPI_Allgather does it.
  // Returns 0, or any other number if it has failed. A wait for the others needs a deadline of its own.
  int (*all_gather)(void* user, const void* mine, size_t bytes, void* all);
  void* user;
} unisono_bootstrap;

typedef struct unisono_comm unisono_comm;
typedef struct unisono_buffer unisono_buffer;
typedef struct unisono_registration unisono_registration;
typedef struct unisono_work unisono_work;

// Returns the text of this thread's last error: a sentence that says what to do. Empty if there was none. The
// text stays as it is until another function fails in this thread.
UNISONO_API const char* unisono_error_text(void);

// Returns the version of the loaded library: 10000·major + 100·minor + patch.
UNISONO_API int unisono_version(void);

// Questions to unisono_query.
enum unisono_question {
  UNISONO_NUM_DTYPES = 0,       // numbers from 0 on that the library knows
  UNISONO_NUM_OPS = 1,          // the same
  UNISONO_NUM_WIRES = 2,        // the same
  UNISONO_NUM_COLLECTIVES = 3,  // the same
  UNISONO_SIZE_OF_CALL = 4,     // bytes of the unisono_call that the library knows
  UNISONO_NUM_GPUS = 5,         // that CUDA sees; 0 without a driver, or without CUDA in this build
};
// Returns what the loaded library can do. Returns -1 for a question that it does not know.
UNISONO_API int64_t unisono_query(int32_t question);

// Makes the communicator of the ranks that `unisono run` has started, or of this process alone. Collective.
// Under another launcher, use unisono_init_by. options: may be null. On an error *comm is null.
UNISONO_API int unisono_init(const unisono_options* options, unisono_comm** comm);
// Makes the communicator of ranks that meet by a callback. Collective.
UNISONO_API int unisono_init_by(const unisono_bootstrap* bootstrap, const unisono_options* options,
                                unisono_comm** comm);

// Makes a communicator of the ranks that give the same color, 0 or more, in the order of `key`, then of their
// numbers in comm. Collective. For a color below 0, and on an error, *made is null.
UNISONO_API int unisono_split(unisono_comm* comm, int32_t color, int32_t key, unisono_comm** made);

// Return this rank's number, and how many ranks there are. Return -1 if comm is null.
UNISONO_API int unisono_rank(const unisono_comm* comm);
UNISONO_API int unisono_size(const unisono_comm* comm);

// Runs a collective: one of unisono_collective. On host memory the output is complete when it returns. On
// device memory it is enqueued.
UNISONO_API int unisono_run(unisono_comm* comm, int32_t collective, const unisono_call* call);

// Begins a collective on host memory and returns at once: a thread of the communicator runs it, after all
// that came before. Buffers stay as they are until it has ended; the struct and what it points to need not. A
// call that is wrong by itself is an error at once. On device memory the call is only enqueued, and the work
// is done. unisono_close and unisono_free end calls that have not, with UNISONO_ERROR_USAGE. On an error
// *work is null.
UNISONO_API int unisono_begin(unisono_comm* comm, int32_t collective, const unisono_call* call,
                              unisono_work** work);
// Waits until the call has ended. Returns its status. timeout_s: returns UNISONO_ERROR_TIMEOUT if the call
// has not ended by then, and unisono_done 0; the call goes on. 0: no limit but the call's own.
UNISONO_API int unisono_wait(const unisono_work* work, double timeout_s);
// Returns 1 if the call has ended, also with an error, else 0. Returns -1 if work is null.
UNISONO_API int unisono_done(const unisono_work* work);
// Calls callback(user) once when the call has ended: in a thread of the communicator, or before this returns
// if the call has ended already. unisono_wait then returns the status at once. The callback may run and begin
// calls.
UNISONO_API int unisono_then(const unisono_work* work, void (*callback)(void* user), void* user);
// Writes what a receive with a tag has taken, if it has ended.
UNISONO_API int unisono_work_received(const unisono_work* work, unisono_received* received);
// Frees the handle; the call goes on. Does nothing for null.
UNISONO_API void unisono_work_free(unisono_work* work);

// Makes memory that every rank of the node reaches, for calls without a copy. Collective, of as many bytes on
// every rank. On an error *buffer is null.
UNISONO_API int unisono_empty(unisono_comm* comm, size_t bytes, int32_t memory, unisono_buffer** buffer);
// Returns this rank's part. Null if the buffer is null.
UNISONO_API void* unisono_buffer_data(const unisono_buffer* buffer);
// Frees the memory, also after unisono_free of its communicator. Does nothing for null.
UNISONO_API void unisono_buffer_free(unisono_buffer* buffer);

// Makes memory of the user's known to every rank, so that calls within it run as on memory of unisono_empty.
// Collective, of as many bytes on every rank. The memory stays where it is until unisono_unregister.
// Errors: every rank gets the error of one. On an error *registration is null, and nothing is registered.
UNISONO_API int unisono_register(unisono_comm* comm, void* data, size_t bytes, int32_t memory,
                                 unisono_registration** registration);
// Ends a registration and frees its handle. Collective. UNISONO_ERROR_USAGE ends and frees nothing; any other
// error ends the registration on this rank. If the communicator is closed or freed, no other rank takes part.
UNISONO_API int unisono_unregister(unisono_registration* registration);

// Waits until what is enqueued on a CUDA stream is done. Returns what went wrong there.
UNISONO_API int unisono_synchronize(unisono_comm* comm, void* stream);

// Returns the communicator's failure, also a rank's death that no call has met yet. UNISONO_OK: it has none.
UNISONO_API int unisono_failure(unisono_comm* comm);
// Fails the communicator on every rank of this node: their calls return UNISONO_ERROR_PEER_LOST with this
// rank's number and `why`, which may be null. Does not wait for them. Other nodes notice when these ranks
// close their communicators.
UNISONO_API int unisono_abort(unisono_comm* comm, const char* why);
// Leaves the communicator: peers that still wait for this rank get UNISONO_ERROR_PEER_LOST. Not collective.
// Later calls return UNISONO_ERROR_USAGE.
UNISONO_API int unisono_close(unisono_comm* comm);
// Closes and frees the communicator. No other thread may use it any more. Does nothing for null.
UNISONO_API void unisono_free(unisono_comm* comm);

#ifdef __cplusplus
}
#endif
