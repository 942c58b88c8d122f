// Runs kernels.cu on the CPU for tests. Each thread of a block is a fibre. The fibres of a warp switch at shuffles, and
// the warps switch at barriers: if a barrier is missing, a warp reads the old values instead of those that another warp
// should have written. Blocks run sequentially.

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define EMULATED
#define LOCAL static _Thread_local
typedef unsigned short bf16;
typedef struct { unsigned x, y; } uint2;
typedef struct { unsigned x, y, z, w; } uint4;
typedef struct { float x, y, z, w; } float4;

// Coordinates of the running fibre.
LOCAL struct { int x, y, z; } threadIdx, blockIdx, blockDim;

enum { MOST = 1024, STACK = 32768 };
LOCAL ucontext_t scheduler, fibres[MOST];
LOCAL unsigned steps[MOST];   // number of waits of each fibre so far
LOCAL int waits_at[MOST];     // line of kernels.cu where the fibre waits, negative at a shuffle; 0 after its end
LOCAL float shown[2][MOST];   // values that fibres exchange; double-buffered, since slower fibres still read the last ones
LOCAL int running;
LOCAL void (*body)(void **);
LOCAL void **arguments;

static void wait_for_others(int line)
{
    waits_at[running] = line;
    steps[running]++;
    swapcontext(&fibres[running], &scheduler);
}

static float shuffled(float value, int mask, int line)
{
    const int me = running, turn = steps[me] & 1;
    shown[turn][me] = value;
    wait_for_others(-line);
    return shown[turn][me ^ mask];
}

static float as_float(unsigned bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static unsigned as_bits(float value)
{
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#define DEVICE static inline
#define KERNEL(threads) static void
#define SHARED LOCAL
#define UNROLL
#define SYNC() wait_for_others(__LINE__)
#define SHUFFLE_XOR(value, mask) shuffled(value, mask, __LINE__)
#define AS_FLOAT(bits) as_float(bits)
#define AS_BITS(value) as_bits(value)
#define INVERSE_ROOT(value) (1.0f / sqrtf(value))
#define ROOT(value) sqrtf(value)
#define LARGER(one, other) fmaxf(one, other)
#define SIGMOID(value) (1.0f / (1.0f + expf(-(value))))
#define READ_ONCE(type, from) (*(const type *)(from))
#define READ_OFTEN(type, from) (*(const type *)(from))
#include "kernels.cu"

#define P(i) *(void **)p[i]
#define I(i) *(int *)p[i]
#define F(i) *(float *)p[i]
static void run_layer_norm(void **p) { layer_norm(P(0), P(1), P(2), P(3), P(4), I(5), I(6), F(7), I(8), I(9), F(10)); }
static void run_layer_norm_pull(void **p) { layer_norm_pull(P(0), P(1), P(2), P(3), P(4), I(5), I(6), F(7), I(8)); }
static void run_rms_rope(void **p) { rms_rope(P(0), P(1), P(2), P(3), P(4), P(5), I(6), I(7), F(8), I(9), F(10)); }
static void run_rms_rope_pull(void **p) { rms_rope_pull(P(0), P(1), P(2), P(3), P(4), P(5), P(6), I(7), I(8), F(9), I(10)); }
static void run_gated_add(void **p) { gated_add(P(0), P(1), P(2), P(3), I(4), I(5), I(6)); }
static void run_gate_pull(void **p) { gate_pull(P(0), P(1), P(2), I(3), I(4), I(5)); }

static void run_channel_norm_f32(void **p) { channel_norm_f32(P(0), P(1), P(2), I(3), I(4), I(5), F(6), F(7)); }
static void run_channel_norm_bf16(void **p) { channel_norm_bf16(P(0), P(1), P(2), I(3), I(4), I(5), F(6), F(7)); }
static void run_channel_norm_pull_f32(void **p) { channel_norm_pull_f32(P(0), P(1), P(2), P(3), I(4), I(5), F(6), I(7), F(8), F(9)); }
static void run_channel_norm_pull_bf16(void **p) { channel_norm_pull_bf16(P(0), P(1), P(2), P(3), I(4), I(5), F(6), I(7), F(8), F(9)); }

static void run_adam(void **p)
{
    adam(P(0), P(1), P(2), P(3), P(4), P(5), P(6), I(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15), F(16));
}

static const struct { const char *name; void (*run)(void **); } KERNELS[] = {
    {"layer_norm", run_layer_norm},       {"layer_norm_pull", run_layer_norm_pull}, {"rms_rope", run_rms_rope},
    {"rms_rope_pull", run_rms_rope_pull}, {"gated_add", run_gated_add},             {"gate_pull", run_gate_pull},
    {"channel_norm_f32", run_channel_norm_f32},           {"channel_norm_bf16", run_channel_norm_bf16},
    {"channel_norm_pull_f32", run_channel_norm_pull_f32}, {"channel_norm_pull_bf16", run_channel_norm_pull_bf16},
    {"adam", run_adam},
};

static void fibre(void)
{
    body(arguments);
    waits_at[running] = 0;
}

// Returns 0 if `count` fibres, `apart` indices apart from `first` on, wait at the same line; else a line where some wait.
static int differs(int first, int count, int apart)
{
    for (int i = 1; i < count; i++) {
        const int here = waits_at[first], there = waits_at[first + i * apart];
        if (here != there) return abs(here ? here : there);
    }
    return 0;
}

// Runs a warp to its next barrier or its end; returns as `run_block`.
static int run_warp(int first, int down)
{
    do {
        for (int turn = 0; turn < 32; turn++) {
            const int i = first + (down ? 31 - turn : turn);
            running = i;
            threadIdx.x = i % blockDim.x;
            threadIdx.y = i / blockDim.x;
            swapcontext(&scheduler, &fibres[i]);
        }
        const int line = differs(first, 32, 1);
        if (line) return line;
    } while (waits_at[first] < 0);
    return 0;
}

// Runs a block whose threads run in ascending or descending order. Returns 0, or a line that some threads do not reach.
static int run_block(int warps, char *stacks, int down)
{
    for (int i = 0; i < 32 * warps; i++) {
        getcontext(&fibres[i]);
        fibres[i].uc_stack.ss_sp = stacks + (size_t)i * STACK;
        fibres[i].uc_stack.ss_size = STACK;
        fibres[i].uc_link = &scheduler;
        makecontext(&fibres[i], fibre, 0);
        steps[i] = 0;
    }
    int line = 0;
    do {
        for (int turn = 0; !line && turn < warps; turn++) line = run_warp(32 * (down ? warps - 1 - turn : turn), down);
        if (!line) line = differs(0, warps, 32);
    } while (!line && waits_at[0]);
    return line;
}

// Runs a kernel. Returns 0; -1 for an unknown kernel, lack of memory or partial warps; else a line that some threads of a
// block do not reach although others wait there.
int emulate(const char *name, void **p, unsigned grid, const unsigned *block, int down)
{
    const int threads = (int)(block[0] * block[1]);
    char *stacks = threads > 0 && threads <= MOST && threads % 32 == 0 ? malloc((size_t)threads * STACK) : 0;
    int result = -1;
    for (size_t k = 0; stacks && k < sizeof KERNELS / sizeof *KERNELS; k++) {
        if (strcmp(KERNELS[k].name, name)) continue;
        body = KERNELS[k].run;
        arguments = p;
        blockDim.x = (int)block[0];
        blockDim.y = (int)block[1];
        result = 0;
        for (unsigned block_of_grid = 0; !result && block_of_grid < grid; block_of_grid++) {
            blockIdx.x = (int)block_of_grid;
            result = run_block(threads / 32, stacks, down);
        }
    }
    free(stacks);
    return result;
}
