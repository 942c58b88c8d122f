/* A stand-in for NCCL and the CUDA runtime, for tests of ranks without a GPU. "Device memory" is host memory, values
 * move between processes through shared memory, and collectives run in a thread, so that a caller that does not wait
 * reads wrong values. Calls that the real libraries would not survive return errors: memory of the wrong side or
 * device, buffers that are too short, a stream that is in use, ranks that call different collectives.
 * Sums are taken in the order of the ranks. */
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
enum { OK = 0, INVALID = 1, NOT_READY = 600 };
enum kind { ALL_REDUCE = 1, REDUCE_SCATTER, ALL_GATHER, BROADCAST };

/* What a rank calls; equal on all ranks. */
struct call { int kind, type, operation, root; size_t count; };

struct shared {
    atomic_int arrived, generation;
    struct call calls[MOST_RANKS];
    float slots[MOST_RANKS][SLOT];
};

struct comm { struct shared *shared; int size, rank, device; };
struct stream { int device; atomic_int state; /* OK, NOT_READY or INVALID */ };
struct block { char *at; size_t bytes; int device; struct block *next; };
struct work { struct comm *comm; struct stream *stream; struct call call; const float *send; float *receive; };

static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;
static _Thread_local int device = 0, group = 0;
/* Streams in use, in this process: memory may not be copied meanwhile. */
static atomic_int busy;

/* The device of memory that holds `bytes` at `at`, or -1. */
static int device_of(const void *at, size_t bytes) {
    int found = -1;
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
int cudaMalloc(void **at, size_t bytes) {
    struct block *b = malloc(sizeof *b);
    *b = (struct block){malloc(bytes), bytes, device, NULL};
    pthread_mutex_lock(&blocks_lock);
    b->next = blocks;
    blocks = b;
    pthread_mutex_unlock(&blocks_lock);
    *at = b->at;
    return OK;
}
int cudaFree(void *at) {
    if (!at) return OK;
    int code = INVALID;
    pthread_mutex_lock(&blocks_lock);
    for (struct block **b = &blocks; *b; b = &(*b)->next)
        if ((*b)->at == at) {
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
int cudaMemcpy(void *to, const void *from, size_t bytes, int direction) {
    int of_to = device_of(to, bytes), of_from = device_of(from, bytes);
    int right = direction == 1 ? of_to == device && of_from < 0 : direction == 2 && of_from == device && of_to < 0;
    if ((bytes && !right) || atomic_load(&busy)) return INVALID;
    memcpy(to, from, bytes);
    return OK;
}
int cudaStreamCreate(struct stream **stream) {
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

static void barrier(struct comm *comm) {
    struct shared *s = comm->shared;
    int generation = atomic_load(&s->generation);
    if (atomic_fetch_add(&s->arrived, 1) + 1 == comm->size) {
        atomic_store(&s->arrived, 0);
        atomic_fetch_add(&s->generation, 1);
        return;
    }
    while (atomic_load(&s->generation) == generation) usleep(20);
}

int ncclGetUniqueId(char id[128]) {
    static atomic_int made;
    memset(id, 0, 128);
    snprintf(id, 128, "/roll-stand-in-%d-%d", getpid(), atomic_fetch_add(&made, 1));
    int file = shm_open(id, O_CREAT | O_EXCL | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct shared))) return INVALID;
    close(file);
    return OK;
}
struct id { char name[128]; };
int ncclCommInitRank(struct comm **comm, int size, struct id id, int rank) {
    int file = shm_open(id.name, O_RDWR, 0600);
    if (file < 0 || size > MOST_RANKS || rank < 0 || rank >= size) return INVALID;
    void *at = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) return INVALID;
    *comm = malloc(sizeof **comm);
    **comm = (struct comm){at, size, rank, device};
    barrier(*comm);
    if (rank == 0) shm_unlink(id.name);
    return OK;
}
int ncclCommDestroy(struct comm *comm) {
    munmap(comm->shared, sizeof *comm->shared);
    free(comm);
    return OK;
}
int ncclGroupStart(void) { group++; return OK; }
int ncclGroupEnd(void) { return group-- > 0 ? OK : INVALID; }
const char *ncclGetErrorString(int code) { return code ? "the stand-in refuses this call" : "no error"; }

static void *run(void *argument) {
    struct work *w = argument;
    struct comm *comm = w->comm;
    struct shared *s = comm->shared;
    struct call *call = &w->call;
    int size = comm->size, code = OK;
    s->calls[comm->rank] = *call;
    barrier(comm);
    for (int r = 0; r < size; r++) if (memcmp(&s->calls[0], &s->calls[r], sizeof *call)) code = INVALID;
    size_t step = call->kind == REDUCE_SCATTER ? SLOT / size : SLOT;
    for (size_t at = 0; code == OK && at < call->count; at += step) {
        size_t n = call->count - at < step ? call->count - at : step;
        float *own = s->slots[comm->rank];
        if (call->kind == REDUCE_SCATTER)
            for (int r = 0; r < size; r++) memcpy(own + r * step, w->send + r * call->count + at, n * 4);
        else
            memcpy(own, w->send + at, n * 4);
        barrier(comm);
        size_t part = call->kind == REDUCE_SCATTER ? comm->rank * step : 0;
        for (int r = 0; r < size; r++) {
            const float *from = s->slots[r] + part;
            if (call->kind == ALL_GATHER) memcpy(w->receive + r * call->count + at, from, n * 4);
            else if (call->kind == BROADCAST) { if (r == call->root) memcpy(w->receive + at, from, n * 4); }
            else for (size_t i = 0; i < n; i++) w->receive[at + i] = r ? w->receive[at + i] + from[i] : from[i];
        }
        barrier(comm);
    }
    barrier(comm);
    atomic_fetch_sub(&busy, 1);
    atomic_store(&w->stream->state, code);
    free(w);
    return NULL;
}

static int start(const void *send, void *receive, struct call call, struct comm *comm, struct stream *stream) {
    int scatter = call.kind == REDUCE_SCATTER, gather = call.kind == ALL_GATHER;
    size_t sent = 4 * call.count * (scatter ? comm->size : 1), received = 4 * call.count * (gather ? comm->size : 1);
    if (call.type != 7 || call.operation != 0 || call.root < 0 || call.root >= comm->size) return INVALID;
    if (comm->device != device || stream->device != device) return INVALID;
    if (device_of(send, sent) != device || device_of(receive, received) != device) return INVALID;
    int idle = OK;
    if (!atomic_compare_exchange_strong(&stream->state, &idle, NOT_READY)) return INVALID;
    atomic_fetch_add(&busy, 1);
    struct work *w = malloc(sizeof *w);
    *w = (struct work){comm, stream, call, send, receive};
    pthread_t thread;
    pthread_create(&thread, NULL, run, w);
    pthread_detach(thread);
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
