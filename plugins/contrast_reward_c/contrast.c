/* A differentiable reward in C: the variance of each frame's values, averaged over frames, times `gain`.
 *
 *     cc -O2 -shared -fPIC -I roll-plugin/include plugins/contrast_reward_c/contrast.c -o libcontrast.so
 *     roll plugins check libcontrast.so
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "roll_plugin.h"

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

static roll_object host;

typedef struct {
    double gain;
} contrast;

static int is(roll_str method, const char *name) {
    return method.len == strlen(name) && memcmp(method.data, name, method.len) == 0;
}

/* What follows `key` in a JSON text, or null. A key such as "\"gain\":" is found here without a JSON library, because
 * its quotes would have backslashes before them inside of a text, and the host writes no spaces. */
static const char *after(roll_str json, const char *key) {
    size_t len = strlen(key);
    for (size_t at = 0; at + len <= json.len; at++)
        if (memcmp(json.data + at, key, len) == 0) return json.data + at + len;
    return NULL;
}

/* The tensor whose number follows `key`, or null. */
static const roll_tensor *tensor_of(const roll_message *message, const char *key) {
    const char *number = after(message->body, key);
    size_t at = number ? strtoul(number, NULL, 10) : message->tensor_count;
    return at < message->tensor_count ? &message->tensors[at] : NULL;
}

/* An answer whose text is a literal; it has nothing to free. */
static uint32_t say(roll_message *answer, uint32_t status, const char *literal) {
    memset(answer, 0, sizeof *answer);
    answer->body.data = literal;
    answer->body.len = strlen(literal);
    return status;
}

static const char no_memory[] = "{\"fault\":\"failure\",\"messages\":[\"there is no memory left\"]}";

/* An answer with a text and, beside it, an object or a tensor: everything that its caller frees at once. */
typedef struct {
    char text[96];
    roll_object object;
    roll_tensor tensor;
} parts;

static uint32_t say_parts(roll_message *answer, parts *own, size_t tensors, size_t objects) {
    roll_message message = {{own->text, strlen(own->text)}, &own->tensor, tensors, &own->object, objects, own, free};
    *answer = message;
    return ROLL_OK;
}

/* What the pullback keeps: the centred values, and the factor of each. It becomes the gradient in place. */
typedef struct {
    size_t shape[4];
    size_t count;
    double slope;
    float values[];
} kept;

static uint32_t call_pullback(void *state, roll_str method, const roll_message *arguments, roll_message *answer) {
    if (!is(method, "pull")) return ROLL_NO_METHOD;
    const roll_tensor *cotangent = tensor_of(arguments, "\"cotangent\":");
    if (!cotangent) return say(answer, ROLL_FAILED, "{\"messages\":[\"there is no cotangent\"]}");
    kept *keep = state;
    parts *own = calloc(1, sizeof *own);
    kept *gradient = malloc(sizeof *gradient + keep->count * sizeof(float));
    if (!own || !gradient) {
        free(own);
        free(gradient);
        return say(answer, ROLL_FAILED, no_memory);
    }
    memcpy(gradient->shape, keep->shape, sizeof keep->shape);
    double slope = keep->slope * *(const float *)cotangent->data;
    for (size_t i = 0; i < keep->count; i++) gradient->values[i] = (float)(slope * keep->values[i]);
    roll_tensor tensor = {gradient->values, keep->count * sizeof(float), gradient->shape, 4, ROLL_F32,
                          gradient,         NULL,                        free};
    own->tensor = tensor;
    strcpy(own->text, "0");
    return say_parts(answer, own, 1, 0);
}

static uint32_t score(const contrast *reward, const roll_message *arguments, roll_message *answer) {
    const roll_tensor *frames = tensor_of(arguments, "\"frames\":");
    if (!frames) return say(answer, ROLL_FAILED, "{\"messages\":[\"there is no video\"]}");
    const float *values = frames->data;
    size_t count = frames->bytes / sizeof(float), per_frame = count / (frames->shape[0] ? frames->shape[0] : 1);
    if (count == 0) return say(answer, ROLL_OK, "{\"result\":{\"missing\":\"the video has no pixels\"}}");
    int record = after(arguments->body, "\"grad\":\"record\"") != NULL;
    kept *keep = record ? malloc(sizeof *keep + count * sizeof(float)) : NULL;
    parts *own = calloc(1, sizeof *own);
    if (!own || (record && !keep)) {
        free(own);
        free(keep);
        return say(answer, ROLL_FAILED, no_memory);
    }
    double sum = 0.0;
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
    double value = reward->gain * sum / (double)count;
    if (!isfinite(value)) { /* `printf` would write `nan`, which is not JSON. */
        free(own);
        free(keep);
        return say(answer, ROLL_OK, "{\"result\":{\"missing\":\"the score is not finite\"}}");
    }
    snprintf(own->text, sizeof own->text, "{\"result\":{\"value\":%.17g},\"pullback\":%s}", value,
             keep ? "0" : "null");
    if (keep) {
        /* The mean's own slope drops out: centred values sum to zero. */
        roll_object pullback = {keep, call_pullback, free};
        memcpy(keep->shape, frames->shape, sizeof keep->shape);
        keep->count = count;
        keep->slope = 2.0 * reward->gain / (double)count;
        own->object = pullback;
    }
    return say_parts(answer, own, 0, keep ? 1 : 0);
}

static uint32_t call_reward(void *state, roll_str method, const roll_message *arguments, roll_message *answer) {
    if (is(method, "score")) return score(state, arguments, answer);
    if (is(method, "about"))
        return say(answer, ROLL_OK, "{\"name\":\"contrast\",\"differentiable\":true,\"reads_reference\":false,"
                                    "\"measures\":{\"label\":\"contrast\"}}");
    return ROLL_NO_METHOD;
}

static uint32_t make(const roll_message *arguments, roll_message *answer) {
    const char *gain = after(arguments->body, "\"gain\":");
    parts *own = calloc(1, sizeof *own);
    contrast *reward = malloc(sizeof *reward);
    if (!own || !reward) {
        free(own);
        free(reward);
        return say(answer, ROLL_FAILED, no_memory);
    }
    /* A number in an object ends before a brace or a comma, so that nothing beyond the text is read. */
    reward->gain = gain ? strtod(gain, NULL) : 0.0;
    if (!(reward->gain > 0.0)) {
        free(own);
        free(reward);
        return say(answer, ROLL_FAILED, "{\"fault\":\"user\",\"messages\":[\"`gain` must be above 0\"]}");
    }
    roll_str log = ROLL_STR("log");
    roll_message message = {
        ROLL_STR("{\"level\":\"debug\",\"target\":\"contrast\",\"message\":\"made\"}"), NULL, 0, NULL, 0, NULL, NULL};
    roll_message said = {{NULL, 0}, NULL, 0, NULL, 0, NULL, NULL};
    if (host.call(host.state, log, &message, &said) != ROLL_NO_METHOD && said.release) said.release(said.owner);
    roll_object object = {reward, call_reward, free};
    own->object = object;
    strcpy(own->text, "0");
    return say_parts(answer, own, 0, 1);
}

static const char description[] =
    "{\"name\":\"contrast_reward_c\",\"version\":\"0.1.0\",\"authors\":\"The authors of roll\","
    "\"about\":\"A reward in C\",\"components\":[{\"kind\":\"reward\",\"name\":\"contrast\","
    "\"summary\":\"Variance of each frame's values; written in C\",\"options\":[{\"name\":\"gain\",\"kind\":\"number\","
    "\"default\":1.0,\"about\":\"Factor of the score, above 0\"}]}]}";

EXPORT const roll_abi roll_plugin_abi = ROLL_ABI_CURRENT;

EXPORT uint32_t roll_plugin_call(void *state, roll_str method, const roll_message *arguments, roll_message *answer) {
    (void)state;
    if (is(method, "make")) return make(arguments, answer);
    if (is(method, "describe")) {
        host = arguments->objects[0];
        return say(answer, ROLL_OK, description);
    }
    return ROLL_NO_METHOD;
}
