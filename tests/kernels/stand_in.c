/* A stand-in for NVIDIA's driver, `libcuda.so.1`: one GPU that runs nothing. And, under the name `libnvrtc.so`, a relay to
 * the real NVRTC that writes down each compilation.
 *
 * With it, a program compiles its CUDA kernels on a machine without a GPU. Results that are read back are zeros. The
 * device's memory is reserved addresses, which take no memory of the host. Requests that a driver refuses are refused:
 * blocks or shared memory that are too large, a kernel that is not in its module, more memory than there is.
 *
 * Variables: ROLL_STAND_IN is sm_80, sm_89 or sm_90; ROLL_STAND_IN_NVRTC the file of the real NVRTC; ROLL_STAND_IN_DIR a
 * directory, which gets the PTX of every module, named by the hash of its text, the messages of NVRTC for each refused
 * kernel, and `log`: a line for each compilation (`compiled SECONDS` or `refused FILE`) and for each refused request
 * (`limit ...`).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
typedef int Result;
typedef unsigned long long Pointer;
typedef void *Handle;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_HANDLE = 400, NOT_FOUND = 500 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static FILE *opened(const char *name, const char *mode) {
    const char *directory = getenv("ROLL_STAND_IN_DIR");
    char path[4096];
    if (!directory) return NULL;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return fopen(path, mode);
}

/* One line of the log, by one write: several processes may share it. */
static void logged(const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&lock);
    FILE *file = opened("log", "a");
    if (file) {
        fwrite(line, 1, length < (int)sizeof line ? (size_t)length : sizeof line - 1, file);
        fclose(file);
    }
    pthread_mutex_unlock(&lock);
}

static unsigned long long hashed(const char *text) {
    uint64_t hash = 14695981039346656037u;
    for (const char *c = text; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211u;
    return hash;
}

/* --- the device --- */

#define MEMORY ((size_t)143771 << 20)
#define MOST_THREADS 1024

/* Compute capability, multiprocessors, threads and blocks of one, shared memory of one and of a block. */
static const struct Card {
    const char *architecture, *name;
    int major, minor, processors, threads, blocks, shared_each, shared;
} CARDS[] = {
    {"sm_80", "A100", 8, 0, 108, 2048, 32, 167936, 166912},
    {"sm_89", "RTX 4090", 8, 9, 128, 1536, 24, 102400, 101376},
    {"sm_90", "H200", 9, 0, 132, 2048, 32, 233472, 232448},
};

static const struct Card *card(void) {
    const char *wanted = getenv("ROLL_STAND_IN");
    for (size_t i = 0; wanted && i < sizeof CARDS / sizeof *CARDS; i++)
        if (!strcmp(CARDS[i].architecture, wanted)) return &CARDS[i];
    return NULL;
}

static const struct { int attribute, value; } ATTRIBUTES[] = {
    {1, MOST_THREADS},                        /* threads of a block */
    {2, 1024}, {3, 1024}, {4, 64},            /* dimensions of a block */
    {5, 2147483647}, {6, 65535}, {7, 65535},  /* dimensions of a grid */
    {8, 49152}, {9, 65536}, {10, 32},         /* shared memory, constant memory, warp */
    {11, 2147483647}, {12, 65536},            /* pitch, registers of a block */
    {13, 1980000}, {14, 512}, {15, 1},        /* kHz, alignment of textures, copies beside kernels */
    {19, 1},                                  /* mapped host memory */
    {31, 1}, {32, 1}, {36, 3201000}, {37, 6144}, {38, 62914560}, /* concurrent kernels, ECC, memory clock, bus, L2 */
    {40, 3}, {41, 1}, {78, 1},                /* copy engines, one address space, priorities of streams */
    {82, 65536}, {83, 1},                     /* registers of a multiprocessor, managed memory */
    {95, 1}, {115, 1},                        /* cooperative launches, pools of memory */
};

API Result cuInit(unsigned flags) { (void)flags; return card() ? SUCCESS : 100; }
API Result cuDriverGetVersion(int *version) { *version = 14000; return SUCCESS; }
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
    snprintf(name, (size_t)length, "%s", card()->name);
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
    const struct Card *gpu = card();
    switch (attribute) {
    case 16: *value = gpu->processors; return SUCCESS;
    case 39: *value = gpu->threads; return SUCCESS;
    case 75: *value = gpu->major; return SUCCESS;
    case 76: *value = gpu->minor; return SUCCESS;
    case 81: *value = gpu->shared_each; return SUCCESS;
    case 97: *value = gpu->shared; return SUCCESS;
    case 106: *value = gpu->blocks; return SUCCESS;
    case 120: *value = gpu->major >= 9; return SUCCESS; /* clusters of blocks */
    }
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
API Result cuCtxSynchronize(void) { return SUCCESS; }

/* --- streams and events: everything is done when it is asked for --- */

API Result cuStreamCreate(Handle *stream, unsigned flags) { (void)flags; *stream = malloc(1); return SUCCESS; }
API Result cuStreamCreateWithPriority(Handle *stream, unsigned flags, int priority) {
    (void)priority;
    return cuStreamCreate(stream, flags);
}
API Result cuStreamDestroy_v2(Handle stream) { free(stream); return SUCCESS; }
API Result cuStreamSynchronize(Handle stream) { (void)stream; return SUCCESS; }
API Result cuStreamQuery(Handle stream) { (void)stream; return SUCCESS; }
API Result cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
    (void)stream, (void)event, (void)flags;
    return SUCCESS;
}
API Result cuEventCreate(Handle *event, unsigned flags) { (void)flags; *event = malloc(1); return SUCCESS; }
API Result cuEventDestroy_v2(Handle event) { free(event); return SUCCESS; }
API Result cuEventRecord(Handle event, Handle stream) { (void)event, (void)stream; return SUCCESS; }
API Result cuEventQuery(Handle event) { (void)event; return SUCCESS; }
API Result cuEventSynchronize(Handle event) { (void)event; return SUCCESS; }
API Result cuEventElapsedTime(float *ms, Handle start, Handle end) {
    (void)start, (void)end;
    *ms = 0.001f;
    return SUCCESS;
}
API Result cuEventElapsedTime_v2(float *ms, Handle start, Handle end) { return cuEventElapsedTime(ms, start, end); }

/* --- modules and launches --- */

API Result cuModuleLoadData(Handle *module, const void *image) {
    /* PTX is text, and the module is that text. */
    char name[64], part[96];
    *module = strdup(image);
    if (!*module) return OUT_OF_MEMORY;
    snprintf(name, sizeof name, "%016llx.ptx", hashed(image));
    snprintf(part, sizeof part, "%s.%d", name, (int)getpid());
    FILE *file = opened(part, "w");
    if (file) {
        char from[4096], to[4096];
        fputs(image, file);
        fclose(file);
        snprintf(from, sizeof from, "%s/%s", getenv("ROLL_STAND_IN_DIR"), part);
        snprintf(to, sizeof to, "%s/%s", getenv("ROLL_STAND_IN_DIR"), name);
        rename(from, to);
    }
    return SUCCESS;
}
API Result cuModuleUnload(Handle module) { free(module); return SUCCESS; }
API Result cuModuleGetFunction(Handle *function, Handle module, const char *name) {
    const char *at = module;
    const size_t length = strlen(name);
    while ((at = strstr(at, ".entry "))) {
        at += strlen(".entry ");
        if (!strncmp(at, name, length) && strchr("( \n\t", at[length])) break;
    }
    if (!at) {
        logged("limit no kernel %.200s in its module\n", name);
        return NOT_FOUND;
    }
    *function = strdup(name);
    return SUCCESS;
}
API Result cuFuncSetAttribute(Handle function, int attribute, int value) {
    if (attribute != 8 || value <= card()->shared) return SUCCESS;
    logged("limit %d bytes of shared memory of %.200s\n", value, (const char *)function);
    return INVALID_VALUE;
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
    if (gx && gy && gz && gx <= 2147483647u && gy <= 65535 && gz <= 65535 && bx && by && bz && bz <= 64
        && shared <= (unsigned)card()->shared && (unsigned long long)bx * by * bz <= MOST_THREADS)
        return SUCCESS;
    logged("limit %u x %u x %u blocks of %u x %u x %u threads with %u bytes of %.200s\n", gx, gy, gz, bx, by, bz, shared,
           (const char *)function);
    return INVALID_VALUE;
}
/* A descriptor of the copy engine is 128 bytes that only a kernel looks at. */
API Result cuTensorMapEncodeTiled(void *map, ...) { memset(map, 0, 128); return SUCCESS; }
API Result cuTensorMapEncodeIm2col(void *map, ...) { memset(map, 0, 128); return SUCCESS; }
API Result cuTensorMapEncodeIm2colWide(void *map, ...) { memset(map, 0, 128); return SUCCESS; }

/* --- memory --- */

struct Block {
    struct Block *next;
    Pointer at;
    size_t bytes;
    int of_device;
};
static struct Block *blocks;
static size_t live;

static Result take(int of_device, void **at, size_t bytes) {
    Result result = INVALID_VALUE;
    if (!bytes) return result;
    pthread_mutex_lock(&lock);
    const int protection = of_device ? PROT_NONE : PROT_READ | PROT_WRITE;
    struct Block *block = malloc(sizeof *block);
    result = OUT_OF_MEMORY;
    if (block && !(of_device && live + bytes > MEMORY)) {
        void *found = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found != MAP_FAILED) {
            *block = (struct Block){blocks, (Pointer)(uintptr_t)found, bytes, of_device};
            blocks = block;
            live += of_device ? bytes : 0;
            *at = found;
            result = SUCCESS;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}
static Result give_back(Pointer at) {
    Result result = INVALID_VALUE;
    if (!at) return SUCCESS;
    pthread_mutex_lock(&lock);
    struct Block **block = &blocks;
    while (*block && (*block)->at != at) block = &(*block)->next;
    if (*block) {
        struct Block *found = *block;
        *block = found->next;
        munmap((void *)(uintptr_t)at, found->bytes);
        live -= found->of_device ? found->bytes : 0;
        free(found);
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
API Result cuMemAlloc_v2(Pointer *at, size_t bytes) {
    void *found = NULL;
    const Result result = take(1, &found, bytes);
    *at = (Pointer)(uintptr_t)found;
    return result;
}
API Result cuMemAllocAsync(Pointer *at, size_t bytes, Handle stream) { (void)stream; return cuMemAlloc_v2(at, bytes); }
API Result cuMemFree_v2(Pointer at) { return give_back(at); }
API Result cuMemFreeAsync(Pointer at, Handle stream) { (void)stream; return give_back(at); }
API Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    *total = MEMORY;
    *free_bytes = MEMORY - live;
    return SUCCESS;
}
API Result cuMemAllocHost_v2(void **at, size_t bytes) { return take(0, at, bytes); }
API Result cuMemHostAlloc(void **at, size_t bytes, unsigned flags) { (void)flags; return take(0, at, bytes); }
API Result cuMemFreeHost(void *at) { return give_back((Pointer)(uintptr_t)at); }

API Result cuMemcpyHtoD_v2(Pointer to, const void *from, size_t bytes) {
    (void)to, (void)from, (void)bytes;
    return SUCCESS;
}
API Result cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t bytes, Handle stream) {
    (void)stream;
    return cuMemcpyHtoD_v2(to, from, bytes);
}
API Result cuMemcpyDtoH_v2(void *to, Pointer from, size_t bytes) {
    (void)from;
    memset(to, 0, bytes);
    return SUCCESS;
}
API Result cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t bytes, Handle stream) {
    (void)stream;
    return cuMemcpyDtoH_v2(to, from, bytes);
}
API Result cuMemcpyDtoD_v2(Pointer to, Pointer from, size_t bytes) {
    (void)to, (void)from, (void)bytes;
    return SUCCESS;
}
API Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, Handle stream) {
    (void)stream;
    return cuMemcpyDtoD_v2(to, from, bytes);
}
API Result cuMemsetD8_v2(Pointer at, unsigned char value, size_t count) {
    (void)at, (void)value, (void)count;
    return SUCCESS;
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
    for (size_t row = 0; copy->to_kind == 1 && row < copy->height; row++)
        memset((char *)copy->to_host + (copy->to_y + row) * copy->to_pitch + copy->to_x, 0, copy->width);
    return SUCCESS;
}

/* --- NVRTC --- */

static Handle real_function(const char *name) {
    static Handle real;
    if (!real) {
        const char *file = getenv("ROLL_STAND_IN_NVRTC");
        real = file ? dlopen(file, RTLD_NOW | RTLD_LOCAL) : NULL;
        if (!real) fprintf(stderr, "the stand-in finds no NVRTC: %s\n", file ? dlerror() : "ROLL_STAND_IN_NVRTC");
    }
    return real ? dlsym(real, name) : NULL;
}

/* NVRTC_ERROR_INTERNAL_ERROR where the real library or the function is missing. */
#define RELAY(name, parameters, arguments)                                  \
    API Result name parameters {                                            \
        Result(*real) parameters = (Result(*) parameters)real_function(#name); \
        return real ? real arguments : 11;                                  \
    }
RELAY(nvrtcVersion, (int *major, int *minor), (major, minor))
RELAY(nvrtcCreateProgram,
      (Handle *program, const char *source, const char *name, int count, const char *const *headers,
       const char *const *names),
      (program, source, name, count, headers, names))
RELAY(nvrtcDestroyProgram, (Handle *program), (program))
RELAY(nvrtcGetProgramLogSize, (Handle program, size_t *size), (program, size))
RELAY(nvrtcGetProgramLog, (Handle program, char *log), (program, log))
RELAY(nvrtcGetPTXSize, (Handle program, size_t *size), (program, size))
RELAY(nvrtcGetPTX, (Handle program, char *ptx), (program, ptx))
RELAY(nvrtcGetCUBINSize, (Handle program, size_t *size), (program, size))
RELAY(nvrtcGetCUBIN, (Handle program, char *cubin), (program, cubin))

API const char *nvrtcGetErrorString(Result code) {
    const char *(*real)(Result) = (const char *(*)(Result))real_function("nvrtcGetErrorString");
    return real ? real(code) : "NVRTC is missing";
}

API Result nvrtcCompileProgram(Handle program, int count, const char *const *options) {
    Result (*real)(Handle, int, const char *const *) =
        (Result(*)(Handle, int, const char *const *))real_function("nvrtcCompileProgram");
    struct timespec start, end;
    size_t size = 0;
    if (!real) return 11;
    clock_gettime(CLOCK_MONOTONIC, &start);
    const Result code = real(program, count, options);
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (code == SUCCESS) {
        logged("compiled %.3f\n", (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec));
        return code;
    }
    char *log = nvrtcGetProgramLogSize(program, &size) == SUCCESS ? calloc(size + 1, 1) : NULL;
    if (log && nvrtcGetProgramLog(program, log) == SUCCESS) {
        char name[64];
        snprintf(name, sizeof name, "%016llx.refused", hashed(log));
        FILE *file = opened(name, "w");
        if (file) {
            fputs(log, file);
            fclose(file);
        }
        logged("refused %s\n", name);
    }
    free(log);
    return code;
}
