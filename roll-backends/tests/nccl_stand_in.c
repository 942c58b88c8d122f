/* A stand-in for NCCL and the CUDA runtime, for tests of ranks without a GPU. "Device memory" is host memory, values
 * move between processes through a shared file, and copies and collectives run in a thread, so that a caller that does
 * not wait reads wrong values. Communicators do not block: a collective comes on its stream some time after the call.
 * Allocations wait until no rank has a collective under way, as they may where GPUs reach each other's memory.
 * Calls that the real libraries would not survive return errors: memory of the wrong side or device, host memory that is
 * not pinned, buffers that are too short, a stream that is in use, ranks that call different collectives.
 * Sums are taken in the order of the ranks. ROLL_STAND_IN names what goes wrong, on rank 2. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_RANKS = 8, SLOT = 1 << 18, GPUS = 4 };
enum { OK = 0, INVALID = 1, REMOTE_ERROR = 6, IN_PROGRESS = 7, NOT_READY = 600 };
/* Sides of memory beside the devices. */
enum { NOWHERE = -1, PINNED = -2 };
/* The collective of a rank in which what ROLL_STAND_IN names happens. */
enum { UNLUCKY = 3 };
enum kind { ALL_REDUCE = 1, REDUCE_SCATTER, ALL_GATHER, BROADCAST };

/* What a rank calls; equal on all ranks. */
struct call { int kind, type, operation, root; size_t count; };

struct shared {
    atomic_int arrived, generation, under_way;
    struct call calls[MOST_RANKS];
    float slots[MOST_RANKS][SLOT];
};

struct comm { struct shared *shared; int size, rank, device, calls; atomic_int state, aborted, threads; };
struct stream { int device; atomic_int state; /* OK, NOT_READY or INVALID */ };
struct block { char *at; size_t bytes; int device; struct block *next; };
struct work { struct comm *comm; struct stream *stream; struct call call; const float *send; float *receive; };

static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;
static _Thread_local int device = 0, group = 0;
/* The job of this process, for allocations; NULL before it starts and after it is aborted. */
static _Atomic(struct shared *) job;

static int happens(const char *what) {
    const char *named = getenv("ROLL_STAND_IN");
    return named && !strcmp(named, what);
}

/* The device of memory that holds `bytes` at `at`, or another side. */
static int device_of(const void *at, size_t bytes) {
    int found = NOWHERE;
    pthread_mutex_lock(&blocks_lock);
    for (struct block *b = blocks; b; b = b->next)
        if ((const char *)at >= b->at && (const char *)at + bytes <= b->at + b->bytes) found = b->device;
    pthread_mutex_unlock(&blocks_lock);
    return found;
}

int cudaGetDeviceCount(int *count) { *count = GPUS; return OK; }
int cudaSetDevice(int number) {
    if (number < 0 || number >= GPUS) return INVALID;
    device = number;
    return OK;
}
int cudaDeviceGetPCIBusId(char *text, int length, int number) {
    if (number < 0 || number >= GPUS) return INVALID;
    snprintf(text, length, "0000:%02x:00.0", happens("one-gpu") ? 1 : number + 1);
    return OK;
}
static void wait_for_kernels(void) {
    for (struct shared *s; (s = atomic_load(&job)) && atomic_load(&s->under_way) > 0;) usleep(20);
}
static int allocate(void **at, size_t bytes, int side) {
    wait_for_kernels();
    struct block *b = malloc(sizeof *b);
    *b = (struct block){malloc(bytes), bytes, side, NULL};
    pthread_mutex_lock(&blocks_lock);
    b->next = blocks;
    blocks = b;
    pthread_mutex_unlock(&blocks_lock);
    *at = b->at;
    return OK;
}
int cudaMalloc(void **at, size_t bytes) { return allocate(at, bytes, device); }
int cudaMallocHost(void **at, size_t bytes) { return allocate(at, bytes, PINNED); }
static int release(void *at, int side) {
    if (!at) return OK;
    wait_for_kernels();
    int code = INVALID;
    pthread_mutex_lock(&blocks_lock);
    for (struct block **b = &blocks; *b; b = &(*b)->next)
        if ((*b)->at == at && (*b)->device == side) {
            struct block *gone = *b;
            *b = gone->next;
            free(gone->at);
            free(gone);
            code = OK;
            break;
        }
    pthread_mutex_unlock(&blocks_lock);
    return code;
}
int cudaFree(void *at) { return release(at, device); }
int cudaFreeHost(void *at) { return release(at, PINNED); }
static void in_thread(void *(*run)(void *), void *argument) {
    pthread_t thread;
    pthread_create(&thread, NULL, run, argument);
    pthread_detach(thread);
}
struct copy { void *to; const void *from; size_t bytes; struct stream *stream; };
static void *run_copy(void *argument) {
    struct copy *c = argument;
    usleep(100);
    memcpy(c->to, c->from, c->bytes);
    atomic_store(&c->stream->state, OK);
    free(c);
    return NULL;
}
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int direction, struct stream *stream) {
    int of_to = device_of(to, bytes), of_from = device_of(from, bytes), idle = OK;
    int right = direction == 1 ? of_to == device && of_from == PINNED
                               : direction == 2 && of_from == device && of_to == PINNED;
    if (!right || stream->device != device) return INVALID;
    if (!atomic_compare_exchange_strong(&stream->state, &idle, NOT_READY)) return INVALID;
    struct copy *c = malloc(sizeof *c);
    *c = (struct copy){to, from, bytes, stream};
    in_thread(run_copy, c);
    return OK;
}
int cudaStreamCreateWithFlags(struct stream **stream, unsigned flags) {
    if (flags != 1) return INVALID;
    *stream = calloc(1, sizeof **stream);
    (*stream)->device = device;
    return OK;
}
int cudaStreamQuery(struct stream *stream) { return atomic_load(&stream->state); }
int cudaStreamDestroy(struct stream *stream) {
    if (atomic_load(&stream->state) == NOT_READY) return INVALID;
    free(stream);
    return OK;
}
const char *cudaGetErrorString(int code) { return code == INVALID ? "the stand-in refuses this call" : "no error"; }

/* Waits for all ranks. Returns 0 if the communicator is aborted meanwhile. */
static int barrier(struct comm *comm) {
    struct shared *s = comm->shared;
    int generation = atomic_load(&s->generation);
    if (atomic_fetch_add(&s->arrived, 1) + 1 == comm->size) {
        atomic_store(&s->arrived, 0);
        atomic_fetch_add(&s->generation, 1);
        return 1;
    }
    while (atomic_load(&s->generation) == generation) {
        if (atomic_load(&comm->aborted)) return 0;
        usleep(20);
    }
    return 1;
}

static void until_aborted(struct comm *comm) {
    while (!atomic_load(&comm->aborted)) usleep(20);
}

int ncclGetUniqueId(char id[128]) {
    static atomic_int made;
    memset(id, 0, 128);
    const char *directory = getenv("LD_LIBRARY_PATH");
    int length = snprintf(id, 128, "%s/job-%d-%d", directory, getpid(), atomic_fetch_add(&made, 1));
    if (length >= 128) return INVALID;
    int file = open(id, O_CREAT | O_TRUNC | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct shared))) return INVALID;
    close(file);
    return OK;
}
struct id { char name[128]; };
struct config { size_t size; unsigned magic, version; int blocking; };
static void *run_start(void *argument) {
    struct comm *comm = argument;
    if (comm->rank == 2 && happens("start-hangs")) until_aborted(comm);
    if (barrier(comm)) atomic_store(&comm->state, OK);
    atomic_fetch_sub(&comm->threads, 1);
    return NULL;
}
int ncclCommInitRankConfig(struct comm **comm, int size, struct id id, int rank, struct config *config) {
    if (config->size < 20 || config->magic != 0xcafebeef || config->version < 21400 || config->blocking) return INVALID;
    if (rank == 2 && happens("start-dies")) _exit(9);
    int file = open(id.name, O_RDWR);
    if (file < 0 || size > MOST_RANKS || rank < 0 || rank >= size) return INVALID;
    void *at = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) return INVALID;
    *comm = calloc(1, sizeof **comm);
    **comm = (struct comm){.shared = at, .size = size, .rank = rank, .device = device, .state = IN_PROGRESS, .threads = 1};
    atomic_store(&job, at);
    in_thread(run_start, *comm);
    return IN_PROGRESS;
}
int ncclCommGetAsyncError(struct comm *comm, int *state) {
    *state = atomic_load(&comm->state);
    return OK;
}
int ncclCommAbort(struct comm *comm) {
    dprintf(2, "stand-in: rank %d aborts\n", comm->rank);
    atomic_store(&job, NULL);
    atomic_store(&comm->aborted, 1);
    while (atomic_load(&comm->threads)) usleep(20);
    munmap(comm->shared, sizeof *comm->shared);
    free(comm);
    return OK;
}
int ncclCommDestroy(struct comm *comm) {
    if (atomic_load(&comm->threads)) return INVALID;
    atomic_store(&job, NULL);
    munmap(comm->shared, sizeof *comm->shared);
    free(comm);
    return OK;
}
int ncclGroupStart(void) { group++; return OK; }
int ncclGroupEnd(void) { return group-- > 0 ? IN_PROGRESS : INVALID; }
const char *ncclGetErrorString(int code) { return code ? "the stand-in refuses this call" : "no error"; }

/* Returns 0 if the communicator is aborted meanwhile. */
static int transfer(struct work *w, int *code) {
    struct comm *comm = w->comm;
    struct shared *s = comm->shared;
    struct call *call = &w->call;
    int size = comm->size;
    s->calls[comm->rank] = *call;
    if (!barrier(comm)) return 0;
    for (int r = 0; r < size; r++) if (memcmp(&s->calls[0], &s->calls[r], sizeof *call)) *code = INVALID;
    size_t step = call->kind == REDUCE_SCATTER ? SLOT / size : SLOT;
    for (size_t at = 0; *code == OK && at < call->count; at += step) {
        size_t n = call->count - at < step ? call->count - at : step;
        float *own = s->slots[comm->rank];
        if (call->kind == REDUCE_SCATTER)
            for (int r = 0; r < size; r++) memcpy(own + r * step, w->send + r * call->count + at, n * 4);
        else
            memcpy(own, w->send + at, n * 4);
        if (!barrier(comm)) return 0;
        size_t part = call->kind == REDUCE_SCATTER ? comm->rank * step : 0;
        for (int r = 0; r < size; r++) {
            const float *from = s->slots[r] + part;
            if (call->kind == ALL_GATHER) memcpy(w->receive + r * call->count + at, from, n * 4);
            else if (call->kind == BROADCAST) { if (r == call->root) memcpy(w->receive + at, from, n * 4); }
            else for (size_t i = 0; i < n; i++) w->receive[at + i] = r ? w->receive[at + i] + from[i] : from[i];
        }
        if (!barrier(comm)) return 0;
    }
    return barrier(comm);
}

static void *run(void *argument) {
    struct work *w = argument;
    struct comm *comm = w->comm;
    int code = OK, idle = OK, unlucky = comm->rank == 2 && ++comm->calls == UNLUCKY;
    usleep(200); /* the caller may look at the stream before */
    if (!atomic_compare_exchange_strong(&w->stream->state, &idle, NOT_READY)) abort();
    atomic_store(&comm->state, OK);
    if (unlucky && happens("dies")) { usleep(300000); _exit(9); }
    if (unlucky && happens("async-error")) atomic_store(&comm->state, REMOTE_ERROR);
    if (unlucky && (happens("async-error") || happens("hangs"))) until_aborted(comm);
    transfer(w, &code);
    atomic_fetch_sub(&comm->shared->under_way, 1);
    atomic_store(&w->stream->state, code);
    free(w);
    atomic_fetch_sub(&comm->threads, 1);
    return NULL;
}

static int start(const void *send, void *receive, struct call call, struct comm *comm, struct stream *stream) {
    int scatter = call.kind == REDUCE_SCATTER, gather = call.kind == ALL_GATHER;
    size_t sent = 4 * call.count * (scatter ? comm->size : 1), received = 4 * call.count * (gather ? comm->size : 1);
    if (call.type != 7 || call.operation != 0 || call.root < 0 || call.root >= comm->size) return INVALID;
    if (comm->device != device || stream->device != device) return INVALID;
    if (device_of(send, sent) != device || device_of(receive, received) != device) return INVALID;
    if (!group || atomic_load(&comm->state) != OK || atomic_load(&stream->state) != OK) return INVALID;
    atomic_store(&comm->state, IN_PROGRESS);
    atomic_fetch_add(&comm->shared->under_way, 1);
    atomic_fetch_add(&comm->threads, 1);
    struct work *w = malloc(sizeof *w);
    *w = (struct work){comm, stream, call, send, receive};
    in_thread(run, w);
    return OK;
}

static struct call make(int kind, size_t count, int type, int operation, int root) {
    struct call call;
    memset(&call, 0, sizeof call); /* compared as bytes */
    call.kind = kind, call.type = type, call.operation = operation, call.root = root, call.count = count;
    return call;
}

int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, struct comm *c, struct stream *s) {
    return start(from, to, make(ALL_REDUCE, n, type, op, 0), c, s);
}
int ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, struct comm *c, struct stream *s) {
    return start(from, to, make(REDUCE_SCATTER, n, type, op, 0), c, s);
}
int ncclAllGather(const void *from, void *to, size_t n, int type, struct comm *c, struct stream *s) {
    return start(from, to, make(ALL_GATHER, n, type, 0, 0), c, s);
}
int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, struct comm *c, struct stream *s) {
    return start(from, to, make(BROADCAST, n, type, 0, root), c, s);
}
