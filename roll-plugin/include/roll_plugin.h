/* The plugin interface of roll, version 1.0, for rewards that are not written in Rust.
 *
 * A plugin is a shared library that exports
 *
 *     const roll_abi roll_plugin_abi = ROLL_ABI_CURRENT;
 *     uint32_t roll_plugin_call(void *state, roll_str method, const roll_message *arguments, roll_message *answer);
 *
 * The first is compared before the second is called. See plugins/contrast_reward_c for a whole one.
 *
 * A call is data. `arguments` is a JSON object with the arguments by name, and the answer is JSON too; tensors and
 * objects are beside the text, which has their numbers in the two lists of the message. The library answers
 *
 *     describe  {"host": 0}
 *               {"name": "...", "version": "...", "authors": "...", "about": "...", "components": [{"kind": "reward",
 *                "name": "...", "summary": "...", "options": [{"name": "...", "kind": "number", "default": 1.0,
 *                "about": "..."}]}]}
 *               Kinds of options: anything, flag, whole_number, number, text, list, map. The object `host` lives as
 *               long as the process. It answers `log_level` {} and `log` {"level": "info", "target": "...",
 *               "message": "..."}; levels are error, warn, info, debug, trace.
 *     make      {"kind": "reward", "name": "...", "options": {...}, "context": {"backend": "flex", "seed": 0,
 *                "base_dir": "."}, ...}
 *               0, the number of the new object. The options are complete; kinds and unknown keys were checked.
 *
 * and a reward, which is the object that `make` answered with,
 *
 *     about     {}
 *               {"name": "...", "differentiable": true, "on_missing": "skip" | "error" | {"value": 0.0},
 *                "reads_reference": true, "measures": {"label": "score", "alias": null}, "terms": [["name", weight]]}
 *               Facts, which do not change. All but the name may be left out: the defaults are false, "skip", true,
 *               the label "score", and no terms. `reads_reference` is false if `prepare` does not look at the
 *               reference, so that rows without a clip can be scored. `measures` has a noun for lines and metrics, and
 *               a second name. If the score is a weighted sum, `terms` has the name of each term's score among the
 *               details, and its weight.
 *     prepare   {"reference": VIDEO}
 *               {"tensors": {"name": 0}}, the target. May be left out.
 *     score     {"video": VIDEO, "prompt": "...", "target": TARGET, "grad": "record" | "skip"}
 *               {"result": {"value": 0.5, "details": {"name": 1.0}}, "pullback": 0}, higher is better; the details may
 *               be left out, and with "skip" the pullback is. Or, if there is nothing to score,
 *               {"result": {"missing": "the reason"}}.
 *     target_key {}
 *               A text that is another one whenever `prepare` may answer otherwise for the same reference: options,
 *               networks. With it `data.cache_dir` keeps targets. The host adds the contents of the library itself.
 *               May be left out.
 *
 * VIDEO is {"frames": 0, "fps": 8.0}; frames are f32 [T, 3, H, W], RGB, values in [-1, 1]. TARGET is the answer of
 * `prepare`. A pullback is an object, and is called at most once:
 *
 *     pull      {"cotangent": 0}, of the score: f32, rank 0
 *               0, the number of the tensor of the frames' cotangent: f32, their shape
 *
 * The contract, numbered as in roll-plugin/src/abi/mod.rs, which has all of it:
 *
 * P1 Arguments are lent for the call. To keep a tensor, call its `retain`, or copy it if that is null.
 * P2 Answers belong to the caller, who calls once the `release` of each of their tensors and objects, and then that of
 *    the message, which frees the text and the two lists. A null `release` means that there is nothing to free. An
 *    object with `release` in arguments belongs to the callee.
 * P3 The library is never unloaded.
 * P4 An object is called by one thread at a time, not always the same one; the library on any, also by several at once.
 * P5 Nothing may be thrown, and no longjmp taken, across the boundary.
 * P6 Later minor versions have more methods, and more fields in arguments. Answer a method that you do not know with
 *    ROLL_NO_METHOD, and pass over unknown fields.
 * P7 A call returns ROLL_OK after it filled in `answer`, ROLL_NO_METHOD, or ROLL_FAILED after it filled in `answer`
 *    with {"fault": "user" | "failure" | "interrupt" | "nothing", "messages": ["..."]}. The fault says who can put it
 *    right; "nothing" means that the reference has nothing to compare with: a fault of one sample, not of the run.
 * P8 An object answers the methods of the kind that it was asked for.
 * P9 Texts are UTF-8 with a length, without a final zero. A number in JSON that is not finite is the text "NaN", "inf"
 *    or "-inf"; `printf` writes `nan`, which is not JSON.
 */
#ifndef ROLL_PLUGIN_H
#define ROLL_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { ROLL_OK, ROLL_FAILED, ROLL_NO_METHOD };
enum { ROLL_F32, ROLL_BF16, ROLL_F16, ROLL_I64, ROLL_I32, ROLL_U8, ROLL_BOOL };

typedef struct {
    uint8_t magic[8];
    uint32_t major, minor;
} roll_abi;

#define ROLL_ABI_CURRENT {{'R', 'O', 'L', 'L', 'P', 'L', 'U', 'G'}, 1, 0}

typedef struct {
    const char *data;
    size_t len;
} roll_str;

/* A roll_str of a string literal. */
#define ROLL_STR(literal) {literal, sizeof(literal) - 1}

/* A dense, row-major array. A null `retain` means that whoever wants to keep the bytes copies them. */
typedef struct {
    void *data;
    size_t bytes;
    const size_t *shape;
    size_t rank;
    uint32_t dtype;
    void *owner;
    void (*retain)(void *owner);
    void (*release)(void *owner);
} roll_tensor;

struct roll_message;

/* Its state, and the function that answers its methods. */
typedef struct {
    void *state;
    uint32_t (*call)(void *state, roll_str method, const struct roll_message *arguments, struct roll_message *answer);
    void (*release)(void *state);
} roll_object;

typedef struct roll_message {
    roll_str body; /* JSON */
    const roll_tensor *tensors;
    size_t tensor_count;
    const roll_object *objects;
    size_t object_count;
    void *owner;
    void (*release)(void *owner);
} roll_message;

#ifdef __cplusplus
}
#endif
#endif
