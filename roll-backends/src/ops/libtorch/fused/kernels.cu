// The memory-bound operations between the matrix products of a transformer block, one kernel each. NVRTC compiles this
// file, which includes no headers, when the first tensor arrives (nvrtc.rs); launch.rs selects grids and blocks.
//
// The file uses the common subset of CUDA C++ and C11: the tests also compile it with the C compiler, run it on the CPU
// (emulate.c), and compare its results with f64.
//
// A row is a token. All arithmetic is in f32; bf16 is rounded once, when it is stored. The order of sums depends only on
// the width, so results are bit-reproducible. `per_width` is 1 / width. Pointers must not alias.

#ifndef EMULATED
typedef unsigned short bf16;
#define DEVICE static __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define SHARED __shared__
#define SYNC() __syncthreads()
#define SHUFFLE_XOR(value, mask) __shfl_xor_sync(0xffffffffu, value, mask)
#define AS_FLOAT(bits) __uint_as_float(bits)
#define AS_BITS(value) __float_as_uint(value)
#define INVERSE_ROOT(value) rsqrtf(value)
#define ROOT(value) sqrtf(value)
#define LARGER(one, other) fmaxf(one, other)
// Accurate to a few ulps of f32, with a fifth of the instructions.
#define SIGMOID(value) __fdividef(1.0f, 1.0f + __expf(-(value)))
// Tensors, which are read once, must not evict gains and angles, which every row reads, from the L1 cache.
#define READ_ONCE(type, from) __ldcs((const type *)(from))
#define READ_OFTEN(type, from) __ldg((const type *)(from))
#define UNROLL _Pragma("unroll")
#endif

// Maximum number of accesses to its row that a thread keeps in registers: 512 threads handle up to 16,384 numbers.
#define FOURS 8
#define EIGHTS 4
// Rows per thread of an element-wise kernel: all their loads are in flight before the first is needed.
#define ROWS 4

// Maximum number of warps in a block of a row reduction.
#define WARPS 16

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 800
// Rounds to the nearest bf16, ties to even.
DEVICE unsigned rounded(float value)
{
    const unsigned bits = AS_BITS(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
#endif

// Packs two bf16, the first in the lower half.
DEVICE unsigned packed(float first, float second)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
#else
    return rounded(first) | rounded(second) << 16;
#endif
}

DEVICE void unpack(unsigned both, float *to)
{
    to[0] = AS_FLOAT(both << 16);
    to[1] = AS_FLOAT(both & 0xffff0000u);
}

DEVICE void read_f32(const float *from, float *to)
{
    const float4 read = READ_ONCE(float4, from);
    to[0] = read.x; to[1] = read.y; to[2] = read.z; to[3] = read.w;
}

DEVICE void read_often(const float *from, float *to)
{
    const float4 read = READ_OFTEN(float4, from);
    to[0] = read.x; to[1] = read.y; to[2] = read.z; to[3] = read.w;
}

DEVICE void write_f32(float *to, const float *from)
{
    float4 written;
    written.x = from[0]; written.y = from[1]; written.z = from[2]; written.w = from[3];
    *(float4 *)to = written;
}

DEVICE void unpack_four(uint2 read, float *to)
{
    unpack(read.x, to); unpack(read.y, to + 2);
}

DEVICE void write_four(bf16 *to, const float *from)
{
    uint2 written;
    written.x = packed(from[0], from[1]); written.y = packed(from[2], from[3]);
    *(uint2 *)to = written;
}

DEVICE void unpack_eight(uint4 read, float *to)
{
    unpack(read.x, to); unpack(read.y, to + 2); unpack(read.z, to + 4); unpack(read.w, to + 6);
}

DEVICE void write_eight(bf16 *to, const float *from)
{
    uint4 written;
    written.x = packed(from[0], from[1]); written.y = packed(from[2], from[3]);
    written.z = packed(from[4], from[5]); written.w = packed(from[6], from[7]);
    *(uint4 *)to = written;
}

DEVICE float add_over_warp(float value)
{
    UNROLL for (int mask = 16; mask > 0; mask /= 2) value += SHUFFLE_XOR(value, mask);
    return value;
}

// Reduces each of `sums` over the threads of a row (one line of the block in x), in place. Every thread of the block
// must call it. `partial` is shared memory for one call only: reuse would need a second barrier between the calls.
DEVICE void add_over_row(float *sums, int count, float (*partial)[WARPS])
{
    const int warps = blockDim.x / 32, first = threadIdx.y * warps, lane = threadIdx.x % 32;
    UNROLL for (int s = 0; s < count; s++) {
        sums[s] = add_over_warp(sums[s]);
        if (lane == 0) partial[s][first + threadIdx.x / 32] = sums[s];
    }
    SYNC();
    // Every warp adds up all partial sums, which saves a second barrier to broadcast the result.
    UNROLL for (int s = 0; s < count; s++) sums[s] = add_over_warp(lane < warps ? partial[s][first + lane] : 0.0f);
}

// y = (x - mean) / sqrt(variance + eps) * gain + shift; moments are mean and 1 / sqrt(variance + eps) of each row.
KERNEL(512) layer_norm(
    const float *__restrict__ x, const float *__restrict__ gain, const float *__restrict__ shift, bf16 *__restrict__ y,
    float *__restrict__ moments, int rows, int width, float per_width, int gain_stride,
    int shift_stride, float eps)
{
    SHARED float partial[2][WARPS];
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    const int fours = row < rows ? width / 4 : 0;
    const size_t start = (size_t)row * width;
    float value[FOURS][4];

    UNROLL for (int i = 0; i < FOURS; i++) {
        const int at = threadIdx.x + i * blockDim.x;
        UNROLL for (int j = 0; j < 4; j++) value[i][j] = 0.0f;
        if (at < fours) read_f32(x + start + 4 * at, value[i]);
    }
    float mean = 0.0f;
    UNROLL for (int i = 0; i < FOURS; i++)
        mean += (value[i][0] + value[i][1]) + (value[i][2] + value[i][3]);
    add_over_row(&mean, 1, partial);
    mean *= per_width;

    // Two passes: mean of squares minus squared mean cancels if the mean is large relative to the deviations.
    float squares = 0.0f;
    UNROLL for (int i = 0; i < FOURS; i++) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at < fours) {
            UNROLL for (int j = 0; j < 4; j++) {
                const float deviation = value[i][j] - mean;
                squares += deviation * deviation;
            }
        }
    }
    add_over_row(&squares, 1, partial + 1);
    const float inverse = INVERSE_ROOT(squares * per_width + eps);

    gain += (size_t)row * gain_stride;
    shift += (size_t)row * shift_stride;
    UNROLL for (int i = 0; i < FOURS; i++) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at < fours) {
            float scale[4], offset[4];
            read_often(gain + 4 * at, scale);
            read_often(shift + 4 * at, offset);
            UNROLL for (int j = 0; j < 4; j++) value[i][j] = (value[i][j] - mean) * inverse * scale[j] + offset[j];
            write_four(y + start + 4 * at, value[i]);
        }
    }
    if (row < rows && threadIdx.x == 0) {
        moments[2 * (size_t)row] = mean;
        moments[2 * (size_t)row + 1] = inverse;
    }
}

// d_x = (d - mean of d - n * mean of (d * n)) * inverse, where n = (x - mean) * inverse and d = d_y * gain.
KERNEL(512) layer_norm_pull(
    const float *__restrict__ x, const float *__restrict__ gain, const float *__restrict__ moments,
    const bf16 *__restrict__ d_y, float *__restrict__ d_x, int rows, int width, float per_width, int gain_stride)
{
    SHARED float partial[2][WARPS];
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    const int fours = row < rows ? width / 4 : 0;
    const size_t start = (size_t)row * width;
    float normed[FOURS][4], d[FOURS][4], sums[2] = {0.0f, 0.0f};
    uint2 read[FOURS];
    float mean = 0.0f, inverse = 0.0f;
    if (row < rows) {
        mean = moments[2 * (size_t)row];
        inverse = moments[2 * (size_t)row + 1];
    }

    UNROLL for (int i = 0; i < FOURS; i++) {
        const int at = threadIdx.x + i * blockDim.x;
        read[i].x = read[i].y = 0;
        UNROLL for (int j = 0; j < 4; j++) normed[i][j] = mean;
        if (at < fours) {
            read_f32(x + start + 4 * at, normed[i]);
            read[i] = READ_ONCE(uint2, d_y + start + 4 * at);
        }
    }
    gain += (size_t)row * gain_stride;
    UNROLL for (int i = 0; i < FOURS; i++) {
        const int at = threadIdx.x + i * blockDim.x;
        float scale[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        unpack_four(read[i], d[i]);
        if (at < fours) read_often(gain + 4 * at, scale);
        UNROLL for (int j = 0; j < 4; j++) {
            normed[i][j] = (normed[i][j] - mean) * inverse;
            d[i][j] *= scale[j];
            sums[0] += d[i][j];
            sums[1] += d[i][j] * normed[i][j];
        }
    }
    add_over_row(sums, 2, partial);
    const float d_mean = sums[0] * per_width, along = sums[1] * per_width;
    UNROLL for (int i = 0; i < FOURS; i++) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at < fours) {
            UNROLL for (int j = 0; j < 4; j++) d[i][j] = (d[i][j] - d_mean - normed[i][j] * along) * inverse;
            write_f32(d_x + start + 4 * at, d[i]);
        }
    }
}

// Rotates the four pairs of `pairs` by the angles with the four cosines and sines at `cosines` and `sines`; backwards if
// `sign` is -1.
DEVICE void turn(float *pairs, const float *cosines, const float *sines, float sign)
{
    float c[4], s[4];
    read_often(cosines, c);
    read_often(sines, s);
    UNROLL for (int j = 0; j < 4; j++) {
        const float even = pairs[2 * j], odd = pairs[2 * j + 1], sine = sign * s[j];
        pairs[2 * j] = even * c[j] - odd * sine;
        pairs[2 * j + 1] = even * sine + odd * c[j];
    }
}

// y = rotate(x / sqrt(mean of squares + eps) * gain). `cosines` and `sines`, [rows, half], apply to every head of
// 2 * half numbers, where `half` is a power of two, at least 4; null omits the rotation.
KERNEL(512) rms_rope(
    const bf16 *__restrict__ x, const float *__restrict__ gain, const float *__restrict__ cosines,
    const float *__restrict__ sines, bf16 *__restrict__ y, float *__restrict__ inverses, int rows, int width, float per_width,
    int half, float eps)
{
    SHARED float partial[1][WARPS];
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    const int eights = row < rows ? width / 8 : 0;
    const size_t start = (size_t)row * width;
    uint4 read[EIGHTS];
    float value[8], squares = 0.0f;

    UNROLL for (int i = 0; i < EIGHTS; i++) {
        const int at = threadIdx.x + i * blockDim.x;
        read[i].x = read[i].y = read[i].z = read[i].w = 0;
        if (at < eights) read[i] = READ_ONCE(uint4, x + start + 8 * at);
    }
    UNROLL for (int i = 0; i < EIGHTS; i++) {
        unpack_eight(read[i], value);
        UNROLL for (int j = 0; j < 8; j++) squares += value[j] * value[j];
    }
    add_over_row(&squares, 1, partial);
    const float inverse = INVERSE_ROOT(squares * per_width + eps);
    const size_t angles = (size_t)row * half;
    UNROLL for (int i = 0; i < EIGHTS; i++) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at < eights) {
            float scale[8];
            read_often(gain + 8 * at, scale);
            read_often(gain + 8 * at + 4, scale + 4);
            unpack_eight(read[i], value);
            UNROLL for (int j = 0; j < 8; j++) value[j] = value[j] * inverse * scale[j];
            if (cosines) {
                const int within = 4 * at & (half - 1);
                turn(value, cosines + angles + within, sines + angles + within, 1.0f);
            }
            write_eight(y + start + 8 * at, value);
        }
    }
    if (row < rows && threadIdx.x == 0) inverses[row] = inverse;
}

// d_x = (d - x * inverse^2 * mean of (d * x)) * inverse, where d is d_y rotated back, times the gain.
KERNEL(512) rms_rope_pull(
    const bf16 *__restrict__ x, const float *__restrict__ gain, const float *__restrict__ inverses,
    const float *__restrict__ cosines, const float *__restrict__ sines, const bf16 *__restrict__ d_y,
    bf16 *__restrict__ d_x, int rows, int width, float per_width, int half)
{
    SHARED float partial[1][WARPS];
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    const int eights = row < rows ? width / 8 : 0;
    const size_t start = (size_t)row * width, angles = (size_t)row * half;
    const float inverse = row < rows ? inverses[row] : 0.0f;
    uint4 read[EIGHTS], d_read[EIGHTS];
    float d[EIGHTS][8], value[8], sum = 0.0f;

    UNROLL for (int i = 0; i < EIGHTS; i++) {
        const int at = threadIdx.x + i * blockDim.x;
        read[i].x = read[i].y = read[i].z = read[i].w = 0;
        d_read[i] = read[i];
        if (at < eights) {
            read[i] = READ_ONCE(uint4, x + start + 8 * at);
            d_read[i] = READ_ONCE(uint4, d_y + start + 8 * at);
        }
    }
    UNROLL for (int i = 0; i < EIGHTS; i++) {
        const int at = threadIdx.x + i * blockDim.x;
        unpack_eight(d_read[i], d[i]);
        if (at < eights) {
            float scale[8];
            read_often(gain + 8 * at, scale);
            read_often(gain + 8 * at + 4, scale + 4);
            if (cosines) {
                const int within = 4 * at & (half - 1);
                turn(d[i], cosines + angles + within, sines + angles + within, -1.0f);
            }
            UNROLL for (int j = 0; j < 8; j++) d[i][j] *= scale[j];
        }
        unpack_eight(read[i], value);
        UNROLL for (int j = 0; j < 8; j++) sum += d[i][j] * value[j];
    }
    add_over_row(&sum, 1, partial);
    const float along = sum * per_width * inverse * inverse;
    UNROLL for (int i = 0; i < EIGHTS; i++) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at < eights) {
            unpack_eight(read[i], value);
            UNROLL for (int j = 0; j < 8; j++) d[i][j] = (d[i][j] - value[j] * along) * inverse;
            write_eight(d_x + start + 8 * at, d[i]);
        }
    }
}

// Number of blocks per row of an element-wise kernel; consecutive blocks access consecutive memory.
DEVICE int parts_of_a_row(int width)
{
    return (width / 4 + blockDim.x - 1) / blockDim.x;
}

// Reads the gate of one access: `shared` if all rows have the same gate, ones without a gate.
DEVICE void gate_of(const float *gate, size_t row, int gate_stride, int column, const float *shared, float *to)
{
    UNROLL for (int j = 0; j < 4; j++) to[j] = shared[j];
    if (gate && gate_stride) read_f32(gate + row * gate_stride + column, to);
}

// Reads the gate's columns of this thread if all rows share one gate: once for ROWS rows.
DEVICE void shared_gate(const float *gate, int gate_stride, int column, float *to)
{
    UNROLL for (int j = 0; j < 4; j++) to[j] = 1.0f;
    if (gate && !gate_stride) read_often(gate + column, to);
}

// z = x + y * gate.
KERNEL(256) gated_add(
    const float *__restrict__ x, const bf16 *__restrict__ y, const float *__restrict__ gate, float *__restrict__ z,
    int rows, int width, int gate_stride)
{
    const int parts = parts_of_a_row(width);
    const int column = 4 * (blockIdx.x % parts * blockDim.x + threadIdx.x);
    const int first = blockIdx.x / parts * (blockDim.y * ROWS) + threadIdx.y;
    if (column >= width) return;
    float value[ROWS][4], scale[ROWS][4], shared[4];
    uint2 read[ROWS];
    shared_gate(gate, gate_stride, column, shared);
    UNROLL for (int r = 0; r < ROWS; r++) {
        const int row = first + r * blockDim.y;
        if (row < rows) {
            const size_t at = (size_t)row * width + column;
            read_f32(x + at, value[r]);
            read[r] = READ_ONCE(uint2, y + at);
            gate_of(gate, row, gate_stride, column, shared, scale[r]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        const int row = first + r * blockDim.y;
        if (row < rows) {
            float add[4];
            unpack_four(read[r], add);
            UNROLL for (int j = 0; j < 4; j++) value[r][j] += add[j] * scale[r][j];
            write_f32(z + (size_t)row * width + column, value[r]);
        }
    }
}

// d_y = d_z * gate.
KERNEL(256) gate_pull(
    const float *__restrict__ d_z, const float *__restrict__ gate, bf16 *__restrict__ d_y, int rows, int width,
    int gate_stride)
{
    const int parts = parts_of_a_row(width);
    const int column = 4 * (blockIdx.x % parts * blockDim.x + threadIdx.x);
    const int first = blockIdx.x / parts * (blockDim.y * ROWS) + threadIdx.y;
    if (column >= width) return;
    float value[ROWS][4], scale[ROWS][4], shared[4];
    shared_gate(gate, gate_stride, column, shared);
    UNROLL for (int r = 0; r < ROWS; r++) {
        const int row = first + r * blockDim.y;
        if (row < rows) {
            read_f32(d_z + (size_t)row * width + column, value[r]);
            gate_of(gate, row, gate_stride, column, shared, scale[r]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        const int row = first + r * blockDim.y;
        if (row < rows) {
            UNROLL for (int j = 0; j < 4; j++) value[r][j] *= scale[r][j];
            write_four(d_y + (size_t)row * width + column, value[r]);
        }
    }
}
