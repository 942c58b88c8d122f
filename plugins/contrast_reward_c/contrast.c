/* A differentiable reward in C: the variance of each frame's values, averaged over frames, times `gain`.
 *
 *     cc -O2 -shared -fPIC -I roll-plugin/include plugins/contrast_reward_c/contrast.c -o libcontrast.so
 *     roll plugins check libcontrast.so
 */
#include <stdlib.h>
#include <string.h>

#include "roll_plugin.h"

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

static const roll_host *host;

typedef struct {
    double gain;
} contrast;

/* `message` is a string literal. */
static uint32_t fail(roll_error *error, uint32_t fault, const char *message) {
    roll_error failed = {fault, {message, strlen(message), NULL, NULL}};
    *error = failed;
    return ROLL_FAILED;
}

static uint32_t facts(void *state, roll_reward_facts *out, roll_error *error) {
    static const char name[] = "contrast";
    roll_reward_facts own = {{name, sizeof name - 1, NULL, NULL}, 1, ROLL_MISSING_SKIP, 0.0};
    (void)state, (void)error;
    *out = own;
    return ROLL_OK;
}

static uint32_t prepare(void *state, const roll_video *reference, roll_tensors *out, roll_error *error) {
    (void)state, (void)reference, (void)error;
    memset(out, 0, sizeof *out);
    return ROLL_OK;
}

/* What the pullback keeps: the centred values, and the factor of each. It becomes the gradient in place. */
typedef struct {
    size_t shape[4];
    size_t count;
    double slope;
    float values[];
} kept;

static uint32_t pull(void *state, const roll_tensor *cotangent, roll_tensor *out, roll_error *error) {
    kept *keep = state;
    kept *gradient = malloc(sizeof *gradient + keep->count * sizeof(float));
    if (!gradient) return fail(error, ROLL_FAULT_FAILURE, "there is no memory for the gradient");
    memcpy(gradient->shape, keep->shape, sizeof keep->shape);
    double slope = keep->slope * *(const float *)cotangent->data;
    for (size_t i = 0; i < keep->count; i++) gradient->values[i] = (float)(slope * keep->values[i]);
    roll_tensor own = {gradient->values, keep->count * sizeof(float), gradient->shape, 4, ROLL_F32,
                       gradient,         NULL,                        free};
    *out = own;
    return ROLL_OK;
}

static uint32_t score(void *state, const roll_video *video, roll_str prompt, roll_tensor_list target, uint32_t record,
                      roll_score *out, roll_error *error) {
    const roll_tensor *frames = &video->frames;
    const float *values = frames->data;
    size_t count = frames->bytes / sizeof(float), per_frame = count / (frames->shape[0] ? frames->shape[0] : 1);
    roll_score own;
    (void)prompt, (void)target;
    memset(&own, 0, sizeof own);
    if (count == 0) {
        static const char reason[] = "the video has no pixels";
        roll_text text = {reason, sizeof reason - 1, NULL, NULL};
        own.missing = 1;
        own.reason = text;
        *out = own;
        return ROLL_OK;
    }
    double gain = ((contrast *)state)->gain, sum = 0.0;
    kept *keep = record ? malloc(sizeof *keep + count * sizeof(float)) : NULL;
    if (record && !keep) return fail(error, ROLL_FAULT_FAILURE, "there is no memory for the pullback");
    for (size_t frame = 0; frame < count; frame += per_frame) {
        double mean = 0.0;
        for (size_t i = 0; i < per_frame; i++) mean += values[frame + i];
        mean /= (double)per_frame;
        for (size_t i = 0; i < per_frame; i++) {
            double centred = values[frame + i] - mean;
            sum += centred * centred;
            if (keep) keep->values[frame + i] = (float)centred;
        }
    }
    own.value = gain * sum / (double)count;
    if (keep) {
        /* The mean's own slope drops out: centred values sum to zero. */
        roll_pullback pullback = {keep, pull, free};
        memcpy(keep->shape, frames->shape, sizeof keep->shape);
        keep->count = count;
        keep->slope = 2.0 * gain / (double)count;
        own.pullback = pullback;
    }
    *out = own;
    return ROLL_OK;
}

static uint32_t measures(void *state, roll_measure *out, roll_error *error) {
    static const char label[] = "contrast";
    roll_measure own = {{label, sizeof label - 1, NULL, NULL}, {NULL, 0, NULL, NULL}};
    (void)state, (void)error;
    *out = own;
    return ROLL_OK;
}

static uint32_t reads_reference(void *state, uint32_t *out, roll_error *error) {
    (void)state, (void)error;
    *out = 0;
    return ROLL_OK;
}

static const roll_reward_table table = {sizeof(roll_reward_table), facts, prepare, score, NULL, measures, NULL,
                                        reads_reference};

static uint32_t make(const void *data, roll_str options, const roll_context *context, roll_object *out,
                     roll_error *error) {
    (void)data, (void)context;
    /* One number needs no JSON library: the host writes {"gain":VALUE}. The text has no final zero. */
    char text[64] = {0};
    memcpy(text, options.data, options.len < sizeof text ? options.len : sizeof text - 1);
    const char *colon = strchr(text, ':');
    contrast *own = malloc(sizeof *own);
    if (!own) return fail(error, ROLL_FAULT_FAILURE, "there is no memory for the reward");
    own->gain = colon ? strtod(colon + 1, NULL) : 0.0;
    if (!(own->gain > 0.0)) {
        free(own);
        return fail(error, ROLL_FAULT_USER, "`gain` must be above 0");
    }
    roll_object object = {own, &table, free};
    roll_str target = ROLL_STR("contrast"), message = ROLL_STR("made");
    if (host->log_level(host->state) >= ROLL_LOG_DEBUG) host->log(host->state, ROLL_LOG_DEBUG, target, message);
    *out = object;
    return ROLL_OK;
}

static const roll_option options[] = {
    {ROLL_STR("gain"), ROLL_NUMBER, ROLL_STR("1.0"), ROLL_STR("Factor of the score, above 0")},
};

static const roll_component reward = {
    sizeof(roll_component), ROLL_KIND_REWARD, ROLL_STR("contrast"),
    ROLL_STR("Variance of each frame's values; written in C"), {options, 1}, NULL, make, NULL,
};

static const roll_component *const components[] = {&reward};

EXPORT const roll_abi roll_plugin_abi = ROLL_ABI_CURRENT;

EXPORT uint32_t roll_plugin_init(const roll_host *given, const roll_plugin **out, roll_error *error) {
    static const roll_plugin own = {
        sizeof(roll_plugin), ROLL_STR("contrast_reward_c"), ROLL_STR("0.1.0"), ROLL_STR("The authors of roll"),
        ROLL_STR("A reward in C"), {components, 1},
    };
    (void)error;
    host = given;
    *out = &own;
    return ROLL_OK;
}
