/* A stand-in for NVIDIA's driver, `libcuda.so.1`: it has one H200, runs nothing on it, and counts what it is asked for.
 *
 * To count launches, copies and allocations of the backend `cuda` without a GPU; see `scripts/count-launches`. Kernels
 * are compiled by the real NVRTC, and then not run: whatever is read back from the device is zero, and times are those
 * of the host alone. Memory of the device is reserved addresses, which take no memory of the host; that of the host
 * that is page-locked is ordinary memory. What a driver refuses is refused: blocks or shared memory that are too large,
 * a kernel that is not in its module, more memory than there is.
 *
 * With ROLL_PTX, the code of every module is left in that directory, for `registers.py`.
 *
 * `count_mark(name)` ends a phase: what was counted since the last mark is appended to the file that the variable
 * ROLL_COUNTS names, one JSON object a line. The end of the process is a mark too. To be called when the device has
 * caught up.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define API __attribute__((visibility("default")))
typedef int Result;
typedef unsigned long long Pointer;
typedef void *Handle;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_HANDLE = 400, NOT_FOUND = 500 };

/* --- the device --- */

#define NAME "NVIDIA H200"
#define MEMORY ((size_t)143771 << 20)
#define MOST_THREADS 1024
#define MOST_SHARED 232448

static const struct { int attribute, value; } ATTRIBUTES[] = {
    {1, MOST_THREADS},                        /* threads of a block */
    {2, 1024}, {3, 1024}, {4, 64},            /* dimensions of a block */
    {5, 2147483647}, {6, 65535}, {7, 65535},  /* dimensions of a grid */
    {8, 49152}, {9, 65536}, {10, 32},         /* shared memory, constant memory, warp */
    {11, 2147483647}, {12, 65536},            /* pitch, registers of a block */
    {13, 1980000}, {14, 512}, {15, 1},        /* kHz, alignment of textures, copies beside kernels */
    {16, 132}, {17, 0}, {18, 0}, {19, 1},     /* multiprocessors, time limit, integrated, mapped host memory */
    {31, 1}, {32, 1}, {36, 3201000}, {37, 6144}, {38, 62914560}, /* concurrent kernels, ECC, memory clock, bus, L2 */
    {39, 2048}, {40, 3}, {41, 1},             /* threads of a multiprocessor, copy engines, one address space */
    {75, 9}, {76, 0}, {78, 1},                /* compute capability 9.0, priorities of streams */
    {81, 233472}, {82, 65536}, {83, 1},       /* shared memory and registers of a multiprocessor, managed memory */
    {95, 1}, {97, MOST_SHARED}, {106, 32}, /* cooperative launches, shared memory on request, blocks */
    {115, 1}, {120, 1},                      /* pools of memory, clusters of blocks */
};

/* --- counting --- */

struct Kernel {
    struct Kernel *next;
    char *name;
    long launches, since;
};

struct Size {
    struct Size *next;
    const char *kind;
    size_t bytes;
    long count;
};

struct Block {
    struct Block *next;
    Pointer at;
    size_t bytes;
};

enum { TO_DEVICE, TO_HOST, ON_DEVICE, FILLED, DIRECTIONS };
enum { DEVICE, PINNED, PLACES };
static const char *DIRECTION[] = {"to_device", "to_host", "on_device", "filled"};
static const char *PLACE[] = {"device", "pinned"};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct Kernel *kernels;
static struct Size *sizes;
static struct Block *blocks[PLACES];
static struct { long calls; size_t bytes; } copies[DIRECTIONS];
static struct { long calls, freed; size_t bytes, live, peak; } memory[PLACES];
static long launches, modules, streams, events, recorded, waits, threads, phase = 1;
static _Thread_local long seen;
static struct timespec since;

/* Of a call that the device would do something for. */
static void enter(void) {
    pthread_mutex_lock(&lock);
    if (seen != phase) {
        seen = phase;
        threads++;
    }
}

static Result leave(Result result) {
    pthread_mutex_unlock(&lock);
    return result;
}

static Result counted(long *what) {
    enter();
    ++*what;
    return leave(SUCCESS);
}

static void quoted(FILE *file, const char *text) {
    fputc('"', file);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') fputc('\\', file);
        fputc((unsigned char)*text < 32 ? ' ' : *text, file);
    }
    fputc('"', file);
}

static void numbers(FILE *file, const char *separator, const char *name, const char *const *keys,
                    const size_t *values) {
    fprintf(file, "%s\"%s\": {", separator, name);
    for (int i = 0; keys[i]; i++) fprintf(file, "%s\"%s\": %zu", i ? ", " : "", keys[i], values[i]);
    fputc('}', file);
}

static void write_counts(FILE *file, const char *name, double seconds) {
    static const char *const OF_COPIES[] = {"calls", "bytes", NULL};
    static const char *const OF_MEMORY[] = {"calls", "bytes", "freed", "live", "peak", NULL};
    fputs("{\"phase\": ", file);
    quoted(file, name);
    fprintf(file, ", \"seconds\": %.6f, \"launches\": %ld, \"modules\": %ld", seconds, launches, modules);
    fprintf(file, ", \"threads\": %ld, \"streams\": %ld, \"events\": %ld", threads, streams, events);
    fprintf(file, ", \"recorded\": %ld, \"waits\": %ld, \"copies\": {", recorded, waits);
    for (int i = 0; i < DIRECTIONS; i++)
        numbers(file, i ? ", " : "", DIRECTION[i], OF_COPIES, (size_t[]){(size_t)copies[i].calls, copies[i].bytes});
    fputs("}, \"memory\": {", file);
    for (int i = 0; i < PLACES; i++) {
        const size_t values[] = {(size_t)memory[i].calls, memory[i].bytes, (size_t)memory[i].freed, memory[i].live,
                                 memory[i].peak};
        numbers(file, i ? ", " : "", PLACE[i], OF_MEMORY, values);
    }
    fputs("}, \"sizes\": [", file);
    const char *separator = "";
    for (struct Size *s = sizes; s; s = s->next)
        if (s->count) {
            fprintf(file, "%s[\"%s\", %zu, %ld]", separator, s->kind, s->bytes, s->count);
            separator = ", ";
        }
    fputs("], \"names\": {", file);
    separator = "";
    for (struct Kernel *k = kernels; k; k = k->next)
        if (k->since) {
            fputs(separator, file);
            quoted(file, k->name);
            fprintf(file, ": %ld", k->since);
            separator = ", ";
        }
    fputs("}}\n", file);
}

API void count_mark(const char *name) {
    pthread_mutex_lock(&lock);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const char *path = getenv("ROLL_COUNTS");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        write_counts(file, name, (double)(now.tv_sec - since.tv_sec) + 1e-9 * (double)(now.tv_nsec - since.tv_nsec));
        fclose(file);
    }
    for (struct Kernel *k = kernels; k; k = k->next) k->since = 0;
    for (struct Size *s = sizes; s; s = s->next) s->count = 0;
    memset(copies, 0, sizeof copies);
    for (int i = 0; i < PLACES; i++) {
        memory[i].calls = memory[i].freed = 0;
        memory[i].bytes = 0;
        memory[i].peak = memory[i].live;
    }
    launches = modules = streams = events = recorded = waits = threads = 0;
    phase++;
    clock_gettime(CLOCK_MONOTONIC, &since);
    pthread_mutex_unlock(&lock);
}

static int used;
__attribute__((constructor)) static void begin(void) { clock_gettime(CLOCK_MONOTONIC, &since); }
/* A process that never asked for the device has nothing to say: a shell, for instance. */
__attribute__((destructor)) static void end(void) { if (used) count_mark("end"); }

/* --- errors, device, context --- */

API Result cuInit(unsigned flags) { (void)flags; used = 1; return SUCCESS; }
API Result cuDriverGetVersion(int *version) { *version = 12080; return SUCCESS; }
API Result cuGetErrorName(Result error, const char **name) {
    switch (error) {
    case SUCCESS: *name = "CUDA_SUCCESS"; break;
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; break;
    default: *name = "CUDA_ERROR_INVALID_HANDLE";
    }
    return SUCCESS;
}
API Result cuGetErrorString(Result error, const char **text) { return cuGetErrorName(error, text); }
API Result cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
API Result cuDeviceGet(int *device, int number) { *device = number; return number == 0 ? SUCCESS : 101; }
API Result cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    snprintf(name, (size_t)length, "%s", NAME);
    return SUCCESS;
}
API Result cuDeviceGetUuid(void *uuid, int device) { (void)device; memset(uuid, 7, 16); return SUCCESS; }
API Result cuDeviceGetUuid_v2(void *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
API Result cuDeviceGetPCIBusId(char *id, int length, int device) {
    (void)device;
    snprintf(id, (size_t)length, "0000:01:00.0");
    return SUCCESS;
}
API Result cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = MEMORY; return SUCCESS; }
API Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = 0;
    for (size_t i = 0; i < sizeof ATTRIBUTES / sizeof *ATTRIBUTES; i++)
        if (ATTRIBUTES[i].attribute == attribute) *value = ATTRIBUTES[i].value;
    return SUCCESS;
}
static int context;
API Result cuDevicePrimaryCtxRetain(Handle *ctx, int device) { (void)device; *ctx = &context; return SUCCESS; }
API Result cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
API Result cuCtxSetCurrent(Handle ctx) { (void)ctx; return SUCCESS; }
API Result cuCtxGetCurrent(Handle *ctx) { *ctx = &context; return SUCCESS; }
API Result cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
API Result cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
API Result cuCtxSynchronize(void) { return counted(&waits); }

/* --- streams and events: everything is done when it is asked for --- */

API Result cuStreamCreate(Handle *stream, unsigned flags) {
    (void)flags;
    *stream = malloc(1);
    return counted(&streams);
}
API Result cuStreamCreateWithPriority(Handle *stream, unsigned flags, int priority) {
    (void)priority;
    return cuStreamCreate(stream, flags);
}
API Result cuStreamDestroy_v2(Handle stream) { free(stream); return SUCCESS; }
API Result cuStreamSynchronize(Handle stream) { (void)stream; return counted(&waits); }
API Result cuStreamQuery(Handle stream) { (void)stream; return SUCCESS; }
API Result cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
    (void)stream, (void)event, (void)flags;
    return SUCCESS;
}
API Result cuEventCreate(Handle *event, unsigned flags) {
    (void)flags;
    *event = malloc(1);
    return counted(&events);
}
API Result cuEventDestroy_v2(Handle event) { free(event); return SUCCESS; }
API Result cuEventRecord(Handle event, Handle stream) { (void)event, (void)stream; return counted(&recorded); }
API Result cuEventQuery(Handle event) { (void)event; return SUCCESS; }
API Result cuEventSynchronize(Handle event) { (void)event; return counted(&waits); }
API Result cuEventElapsedTime(float *ms, Handle start, Handle end) {
    (void)start, (void)end;
    *ms = 0.001f;
    return SUCCESS;
}
API Result cuEventElapsedTime_v2(float *ms, Handle start, Handle end) { return cuEventElapsedTime(ms, start, end); }

/* --- modules and launches --- */

/* Writes PTX to the directory that the variable ROLL_PTX names, the same text to the same file. */
static void keep(const char *ptx) {
    const char *directory = getenv("ROLL_PTX");
    if (!directory) return;
    uint64_t hash = 14695981039346656037u;
    for (const char *c = ptx; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211u;
    char path[4096];
    snprintf(path, sizeof path, "%s/%016llx.ptx", directory, (unsigned long long)hash);
    FILE *file = fopen(path, "w");
    if (!file) return;
    fputs(ptx, file);
    fclose(file);
}
API Result cuModuleLoadData(Handle *module, const void *image) {
    /* PTX is text, and the module is that text. */
    *module = strdup(image);
    keep(image);
    return *module ? counted(&modules) : OUT_OF_MEMORY;
}
API Result cuModuleUnload(Handle module) { free(module); return SUCCESS; }
API Result cuModuleGetFunction(Handle *function, Handle module, const char *name) {
    const char *at = module;
    const size_t length = strlen(name);
    while ((at = strstr(at, ".entry "))) {
        at += strlen(".entry ");
        if (!strncmp(at, name, length) && strchr("( \n\t", at[length])) break;
    }
    if (!at) return NOT_FOUND;
    enter();
    struct Kernel *kernel = kernels;
    while (kernel && strcmp(kernel->name, name)) kernel = kernel->next;
    if (!kernel && (kernel = calloc(1, sizeof *kernel))) {
        kernel->name = strdup(name);
        kernel->next = kernels;
        kernels = kernel;
    }
    *function = kernel;
    return leave(kernel && kernel->name ? SUCCESS : OUT_OF_MEMORY);
}
API Result cuFuncSetAttribute(Handle function, int attribute, int value) {
    (void)function;
    return attribute == 8 && value > MOST_SHARED ? INVALID_VALUE : SUCCESS;
}
API Result cuFuncGetAttribute(int *value, int attribute, Handle function) {
    (void)function;
    *value = attribute == 0 ? MOST_THREADS : 0;
    return SUCCESS;
}
API Result cuLaunchKernel(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, Handle stream, void **arguments, void **extra) {
    (void)stream, (void)arguments, (void)extra;
    if (!function) return INVALID_HANDLE;
    if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || !bx || !by || !bz || bz > 64 || shared > MOST_SHARED
        || (unsigned long long)bx * by * bz > MOST_THREADS)
        return INVALID_VALUE;
    enter();
    struct Kernel *kernel = function;
    kernel->launches++;
    kernel->since++;
    launches++;
    return leave(SUCCESS);
}
/* A descriptor of the copy engine is 128 bytes that only a kernel looks at. */
API Result cuTensorMapEncodeTiled(void *map, ...) { memset(map, 0, 128); return SUCCESS; }
API Result cuTensorMapEncodeIm2col(void *map, ...) { memset(map, 0, 128); return SUCCESS; }
API Result cuTensorMapEncodeIm2colWide(void *map, ...) { memset(map, 0, 128); return SUCCESS; }

/* --- memory --- */

static Result take(int place, void **at, size_t bytes) {
    if (!bytes) return INVALID_VALUE;
    enter();
    if (place == DEVICE && memory[place].live + bytes > MEMORY) return leave(OUT_OF_MEMORY);
    const int protection = place == DEVICE ? PROT_NONE : PROT_READ | PROT_WRITE;
    void *found = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct Block *block = malloc(sizeof *block);
    if (found == MAP_FAILED || !block) return leave(OUT_OF_MEMORY);
    *block = (struct Block){blocks[place], (Pointer)(uintptr_t)found, bytes};
    blocks[place] = block;
    memory[place].calls++;
    memory[place].bytes += bytes;
    memory[place].live += bytes;
    if (memory[place].live > memory[place].peak) memory[place].peak = memory[place].live;
    struct Size *size = sizes;
    while (size && !(size->kind == PLACE[place] && size->bytes == bytes)) size = size->next;
    if (!size && (size = calloc(1, sizeof *size))) {
        *size = (struct Size){sizes, PLACE[place], bytes, 0};
        sizes = size;
    }
    if (size) size->count++;
    *at = found;
    return leave(SUCCESS);
}
static Result give_back(int place, Pointer at) {
    if (!at) return SUCCESS;
    enter();
    struct Block **block = &blocks[place];
    while (*block && (*block)->at != at) block = &(*block)->next;
    if (!*block) return leave(INVALID_VALUE);
    struct Block *found = *block;
    *block = found->next;
    munmap((void *)(uintptr_t)at, found->bytes);
    memory[place].live -= found->bytes;
    memory[place].freed++;
    free(found);
    return leave(SUCCESS);
}
API Result cuMemAlloc_v2(Pointer *at, size_t bytes) {
    void *found = NULL;
    const Result result = take(DEVICE, &found, bytes);
    *at = (Pointer)(uintptr_t)found;
    return result;
}
API Result cuMemAllocAsync(Pointer *at, size_t bytes, Handle stream) { (void)stream; return cuMemAlloc_v2(at, bytes); }
API Result cuMemFree_v2(Pointer at) { return give_back(DEVICE, at); }
API Result cuMemFreeAsync(Pointer at, Handle stream) { (void)stream; return give_back(DEVICE, at); }
API Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    *total = MEMORY;
    *free_bytes = MEMORY - memory[DEVICE].live;
    return SUCCESS;
}
API Result cuMemAllocHost_v2(void **at, size_t bytes) { return take(PINNED, at, bytes); }
API Result cuMemHostAlloc(void **at, size_t bytes, unsigned flags) { (void)flags; return take(PINNED, at, bytes); }
API Result cuMemFreeHost(void *at) { return give_back(PINNED, (Pointer)(uintptr_t)at); }

static Result copied(int direction, size_t bytes) {
    enter();
    copies[direction].calls++;
    copies[direction].bytes += bytes;
    return leave(SUCCESS);
}
API Result cuMemcpyHtoD_v2(Pointer to, const void *from, size_t bytes) {
    (void)to, (void)from;
    return copied(TO_DEVICE, bytes);
}
API Result cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t bytes, Handle stream) {
    (void)stream;
    return cuMemcpyHtoD_v2(to, from, bytes);
}
API Result cuMemcpyDtoH_v2(void *to, Pointer from, size_t bytes) {
    (void)from;
    memset(to, 0, bytes);
    return copied(TO_HOST, bytes);
}
API Result cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t bytes, Handle stream) {
    (void)stream;
    return cuMemcpyDtoH_v2(to, from, bytes);
}
API Result cuMemcpyDtoD_v2(Pointer to, Pointer from, size_t bytes) {
    (void)to, (void)from;
    return copied(ON_DEVICE, bytes);
}
API Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, Handle stream) {
    (void)stream;
    return cuMemcpyDtoD_v2(to, from, bytes);
}
API Result cuMemsetD8_v2(Pointer at, unsigned char value, size_t count) {
    (void)at, (void)value;
    return copied(FILLED, count);
}
API Result cuMemsetD8Async(Pointer at, unsigned char value, size_t count, Handle stream) {
    (void)stream;
    return cuMemsetD8_v2(at, value, count);
}

/* As in cuda.h, `CUDA_MEMCPY2D`: kinds of memory are 1 the host's, 2 the device's. */
struct Copy2D {
    size_t from_x, from_y;
    unsigned from_kind;
    const void *from_host;
    Pointer from_device;
    Handle from_array;
    size_t from_pitch, to_x, to_y;
    unsigned to_kind;
    void *to_host;
    Pointer to_device;
    Handle to_array;
    size_t to_pitch, width, height;
};
API Result cuMemcpy2DAsync_v2(const struct Copy2D *copy, Handle stream) {
    (void)stream;
    if (copy->to_kind == 1) {
        for (size_t row = 0; row < copy->height; row++)
            memset((char *)copy->to_host + (copy->to_y + row) * copy->to_pitch + copy->to_x, 0, copy->width);
        return copied(TO_HOST, copy->width * copy->height);
    }
    return copied(copy->from_kind == 1 ? TO_DEVICE : ON_DEVICE, copy->width * copy->height);
}
