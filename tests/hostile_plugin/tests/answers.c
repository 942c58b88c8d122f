/* A library whose answers the tests choose. `ANSWERS` is defined before: the method, the status and the text of each. */
#include <string.h>

#include "roll_plugin.h"

#ifndef MINOR
#define MINOR 0
#endif
#ifndef DTYPE
#define DTYPE ROLL_F32
#endif
#ifndef RANK
#define RANK 1
#endif
#ifndef BYTES
#define BYTES sizeof values
#endif
#ifndef DATA
#define DATA values
#endif
#ifndef TENSORS
#define TENSORS &tensor
#endif
#ifndef TENSOR_COUNT
#define TENSOR_COUNT 1
#endif
#ifndef OBJECT_COUNT
#define OBJECT_COUNT 1
#endif
#ifndef CALL
#define CALL roll_plugin_call
#endif

uint32_t roll_plugin_call(void *state, roll_str method, const roll_message *arguments, roll_message *answer);

static const struct {
    const char *method;
    uint32_t status;
    const char *text;
} answers[] = {ANSWERS};

/* Beside every answer lie a tensor of two values and an object that answers as the library. */
static float values[] = {0.5f, -0.5f};
static const size_t shape[32] = {2};
static const roll_tensor tensor = {DATA, BYTES, shape, RANK, DTYPE, NULL, NULL, NULL};
static const roll_object object = {NULL, CALL, NULL};

uint32_t roll_plugin_call(void *state, roll_str method, const roll_message *arguments, roll_message *answer) {
    (void)state, (void)arguments, (void)values, (void)tensor;
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        size_t len = strlen(answers[i].method);
        if (method.len != len || memcmp(method.data, answers[i].method, len) != 0) continue;
        roll_message own = {{answers[i].text, strlen(answers[i].text)}, TENSORS, TENSOR_COUNT, &object, OBJECT_COUNT,
                            NULL, NULL};
        *answer = own;
        return answers[i].status;
    }
    return ROLL_NO_METHOD;
}

const roll_abi roll_plugin_abi = {{'R', 'O', 'L', 'L', 'P', 'L', 'U', 'G'}, 1, MINOR};
