// Channel norm of the VAE and SiLU, appended to kernels.cu. A row is a position of a volume whose channels are innermost.
// `lanes` threads of a warp, a power of two, share a row of at most 4 * PARTS * lanes channels: rows are short, and one
// warp per row would have too few bytes in flight. `root` is sqrt(width). The bodies serve f32 and bf16 (`narrow`, which
// is constant in each kernel).
#define PARTS 4

DEVICE void read_four(const void *from, size_t at, int narrow, float *to)
{
    if (narrow) unpack_four(READ_ONCE(uint2, (const bf16 *)from + at), to);
    else read_f32((const float *)from + at, to);
}

DEVICE void store_four(void *to, size_t at, int narrow, const float *from)
{
    if (narrow) write_four((bf16 *)to + at, from);
    else write_f32((float *)to + at, from);
}

// Returns the sum over the threads of a row; every thread of the warp must call it.
DEVICE float add_over_lanes(float value, int lanes)
{
    UNROLL for (int mask = 16; mask > 0; mask /= 2) {
        const float other = SHUFFLE_XOR(value, mask);
        if (mask < lanes) value += other;
    }
    return value;
}

// y = n * gain * sigmoid(n * gain) with n = x * root / max(|x|, least).
DEVICE void channel_norm(
    const void *x, const float *gain, void *y, int rows, int width, int lanes, float root, float least, int narrow)
{
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / lanes, lane = threadIdx.x % lanes;
    const int fours = row < rows ? width / 4 : 0;
    const size_t start = (size_t)row * width;
    float value[PARTS][4], squares = 0.0f;

    UNROLL for (int i = 0; i < PARTS; i++) {
        const int at = lane + i * lanes;
        UNROLL for (int j = 0; j < 4; j++) value[i][j] = 0.0f;
        if (at < fours) read_four(x, start + 4 * at, narrow, value[i]);
    }
    UNROLL for (int i = 0; i < PARTS; i++) {
        UNROLL for (int j = 0; j < 4; j++) squares += value[i][j] * value[i][j];
    }
    const float factor = root / LARGER(ROOT(add_over_lanes(squares, lanes)), least);
    UNROLL for (int i = 0; i < PARTS; i++) {
        const int at = lane + i * lanes;
        if (at < fours) {
            float scale[4];
            read_often(gain + 4 * at, scale);
            UNROLL for (int j = 0; j < 4; j++) {
                const float scaled = value[i][j] * factor * scale[j];
                value[i][j] = scaled * SIGMOID(scaled);
            }
            store_four(y, start + 4 * at, narrow, value[i]);
        }
    }
}

// d_x = (d - n * mean of (n * d)) * root / max(|x|, least), where d is the cotangent of n.
DEVICE void channel_norm_pull(
    const void *x, const float *gain, const void *d_y, void *d_x, int rows, int width, float per_width, int lanes,
    float root, float least, int narrow)
{
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / lanes, lane = threadIdx.x % lanes;
    const int fours = row < rows ? width / 4 : 0;
    const size_t start = (size_t)row * width;
    float normed[PARTS][4], d[PARTS][4], squares = 0.0f, along = 0.0f;

    UNROLL for (int i = 0; i < PARTS; i++) {
        const int at = lane + i * lanes;
        UNROLL for (int j = 0; j < 4; j++) normed[i][j] = d[i][j] = 0.0f;
        if (at < fours) {
            read_four(x, start + 4 * at, narrow, normed[i]);
            read_four(d_y, start + 4 * at, narrow, d[i]);
        }
    }
    UNROLL for (int i = 0; i < PARTS; i++) {
        UNROLL for (int j = 0; j < 4; j++) squares += normed[i][j] * normed[i][j];
    }
    const float factor = root / LARGER(ROOT(add_over_lanes(squares, lanes)), least);
    UNROLL for (int i = 0; i < PARTS; i++) {
        const int at = lane + i * lanes;
        float scale[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (at < fours) read_often(gain + 4 * at, scale);
        UNROLL for (int j = 0; j < 4; j++) {
            normed[i][j] *= factor;
            const float scaled = normed[i][j] * scale[j], s = SIGMOID(scaled);
            d[i][j] *= (s + scaled * s * (1.0f - s)) * scale[j];
            along += normed[i][j] * d[i][j];
        }
    }
    along = add_over_lanes(along, lanes) * per_width;
    UNROLL for (int i = 0; i < PARTS; i++) {
        const int at = lane + i * lanes;
        if (at < fours) {
            UNROLL for (int j = 0; j < 4; j++) d[i][j] = (d[i][j] - normed[i][j] * along) * factor;
            store_four(d_x, start + 4 * at, narrow, d[i]);
        }
    }
}

KERNEL(128) channel_norm_f32(
    const float *__restrict__ x, const float *__restrict__ gain, float *__restrict__ y, int rows, int width, int lanes,
    float root, float least)
{
    channel_norm(x, gain, y, rows, width, lanes, root, least, 0);
}

KERNEL(128) channel_norm_bf16(
    const bf16 *__restrict__ x, const float *__restrict__ gain, bf16 *__restrict__ y, int rows, int width, int lanes,
    float root, float least)
{
    channel_norm(x, gain, y, rows, width, lanes, root, least, 1);
}

KERNEL(128) channel_norm_pull_f32(
    const float *__restrict__ x, const float *__restrict__ gain, const float *__restrict__ d_y, float *__restrict__ d_x,
    int rows, int width, float per_width, int lanes, float root, float least)
{
    channel_norm_pull(x, gain, d_y, d_x, rows, width, per_width, lanes, root, least, 0);
}

KERNEL(128) channel_norm_pull_bf16(
    const bf16 *__restrict__ x, const float *__restrict__ gain, const bf16 *__restrict__ d_y, bf16 *__restrict__ d_x,
    int rows, int width, float per_width, int lanes, float root, float least)
{
    channel_norm_pull(x, gain, d_y, d_x, rows, width, per_width, lanes, root, least, 1);
}
