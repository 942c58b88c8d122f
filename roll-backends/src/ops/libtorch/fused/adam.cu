// One update of AdamW, appended to kernels.cu. roll_core::AdamUpdate has the formulas. A thread takes four numbers, the last
// one those that are left.
DEVICE float adam_number(
    float p, float g, float *m, float *v, float beta_2, float rest_1, float rest_2, float eps, float step_size,
    float root_correction, float keep)
{
    *m = *m + rest_1 * (g - *m);
    *v = *v * beta_2 + rest_2 * g * g;
    return p * keep - step_size * (*m / (ROOT(*v) / root_correction + eps));
}

KERNEL(256) adam(
    const float *__restrict__ p, const float *__restrict__ g, const float *__restrict__ m, const float *__restrict__ v,
    float *__restrict__ p_to, float *__restrict__ m_to, float *__restrict__ v_to, int count, float scale, float clipping,
    float beta_2, float rest_1, float rest_2, float eps, float step_size, float root_correction, float keep)
{
    const int start = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    float p_four[4], g_four[4], m_four[4], v_four[4];
    const int whole = start <= count - 4;

    if (start >= count) return;
    UNROLL for (int j = 0; j < 4; j++) p_four[j] = g_four[j] = m_four[j] = v_four[j] = 0.0f;
    if (whole) {
        read_f32(p + start, p_four); read_f32(g + start, g_four);
        read_f32(m + start, m_four); read_f32(v + start, v_four);
    } else {
        UNROLL for (int j = 0; j < 4; j++) {
            if (start + j < count) {
                p_four[j] = p[start + j]; g_four[j] = g[start + j];
                m_four[j] = m[start + j]; v_four[j] = v[start + j];
            }
        }
    }
    UNROLL for (int j = 0; j < 4; j++) {
        p_four[j] = adam_number(
            p_four[j], g_four[j] * scale * clipping, &m_four[j], &v_four[j], beta_2, rest_1, rest_2, eps, step_size,
            root_correction, keep);
    }
    if (whole) {
        write_f32(p_to + start, p_four); write_f32(m_to + start, m_four); write_f32(v_to + start, v_four);
    } else {
        UNROLL for (int j = 0; j < 4; j++) {
            if (start + j < count) {
                p_to[start + j] = p_four[j]; m_to[start + j] = m_four[j]; v_to[start + j] = v_four[j];
            }
        }
    }
}
