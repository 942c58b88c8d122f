/* The plugin interface of roll, version 1.0, for rewards that are not written in Rust.
 *
 * A plugin is a shared library that exports
 *
 *     const roll_abi roll_plugin_abi = ROLL_ABI_CURRENT;
 *     uint32_t roll_plugin_init(const roll_host *host, const roll_plugin **out, roll_error *error);
 *
 * The first is compared before the second is called, once. See plugins/contrast_reward_c for a whole one.
 *
 * The contract, numbered as in roll-plugin/src/abi/mod.rs, which has all of it:
 *
 * P1 Arguments are lent for the call.
 * P2 Results belong to the caller, who calls their `release` once with their `owner`; a null `release` means that there
 *    is nothing to free.
 * P3 Tables and what the plugin says of itself live as long as the library, which is never unloaded.
 * P4 An object is called by one thread at a time, not always the same one; `make` may be called on any.
 * P5 Nothing may be thrown, and no longjmp taken, across the boundary.
 * P6 What begins with `size` grows at its end: fill in `sizeof` yours, and before you read a member of the host's that
 *    is marked "since", see that its `size` reaches that far (ROLL_HAS). Members that are zero are not there.
 * P7 Every function that returns uint32_t returns ROLL_OK after it filled in `out`, or ROLL_FAILED after it filled in
 *    `error`.
 * P9 Texts are UTF-8 with a length, without a final zero.
 */
#ifndef ROLL_PLUGIN_H
#define ROLL_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ROLL_OK 0u
#define ROLL_FAILED 1u

/* Who can put an error right. */
enum { ROLL_FAULT_USER = 1, ROLL_FAULT_FAILURE = 2, ROLL_FAULT_INTERRUPT = 3,
       /* The reference has nothing to compare with: a fault of one sample, not of the run. */
       ROLL_FAULT_NOTHING = 4 };
enum { ROLL_F32, ROLL_BF16, ROLL_F16, ROLL_I64, ROLL_I32, ROLL_U8, ROLL_BOOL };
enum { ROLL_LOG_ERROR = 1, ROLL_LOG_WARN, ROLL_LOG_INFO, ROLL_LOG_DEBUG, ROLL_LOG_TRACE };
enum { ROLL_KIND_REWARD = 1 };
enum { ROLL_ANYTHING, ROLL_FLAG, ROLL_WHOLE_NUMBER, ROLL_NUMBER, ROLL_TEXT, ROLL_LIST, ROLL_MAP };
enum { ROLL_MISSING_SKIP, ROLL_MISSING_ERROR, ROLL_MISSING_VALUE };

typedef struct {
    uint8_t magic[8];
    uint32_t major, minor;
} roll_abi;

#define ROLL_ABI_CURRENT {{'R', 'O', 'L', 'L', 'P', 'L', 'U', 'G'}, 1, 0}

typedef void (*roll_release)(void *owner);

typedef struct {
    const char *data;
    size_t len;
} roll_str;

/* Whether the other side's structure reaches as far as `member` (P6). */
#define ROLL_HAS(pointer, type, member) \
    ((pointer)->size >= offsetof(type, member) + sizeof((pointer)->member))

/* A roll_str of a string literal. */
#define ROLL_STR(literal) {literal, sizeof(literal) - 1}

/* A dense, row-major array. A null `retain` means that whoever wants to keep the bytes copies them. */
typedef struct {
    const void *data;
    size_t bytes;
    const size_t *shape;
    size_t rank;
    uint32_t dtype;
    void *owner;
    roll_release retain, release;
} roll_tensor;

typedef struct {
    roll_str name;
    roll_tensor tensor;
} roll_named_tensor;

typedef struct {
    roll_str name;
    double value;
} roll_named_number;

/* A list that is lent. */
typedef struct {
    const roll_named_tensor *items;
    size_t len;
} roll_tensor_list;

/* Lists that their receiver releases. */
typedef struct {
    const char *items;
    size_t len;
    void *owner;
    roll_release release;
} roll_text;

typedef struct {
    const roll_named_tensor *items;
    size_t len;
    void *owner;
    roll_release release;
} roll_tensors;

typedef struct {
    const roll_named_number *items;
    size_t len;
    void *owner;
    roll_release release;
} roll_numbers;

typedef struct {
    uint32_t fault;
    roll_text text;
} roll_error;

/* What a component made: its state, and a static table of its kind's functions. */
typedef struct {
    void *state;
    const void *table;
    roll_release release;
} roll_object;

/* From the cotangent of the score (f32, rank 0) to that of the frames (f32, their shape). Called at most once, then
 * released. A null `pull` means that there is no pullback. */
typedef struct {
    void *state;
    uint32_t (*pull)(void *state, const roll_tensor *cotangent, roll_tensor *out, roll_error *error);
    roll_release release;
} roll_pullback;

typedef struct {
    size_t size;
    roll_str backend;  /* "flex", "cuda:1" */
    roll_str base_dir; /* where relative paths of the options start */
    uint64_t seed;
    size_t placement;  /* for models */
    roll_object ranks; /* for strategies and algorithms */
} roll_context;

typedef struct {
    roll_str name;
    uint32_t kind;
    roll_str default_json;
    roll_str about;
} roll_option;

typedef struct {
    const roll_option *items;
    size_t len;
} roll_option_list;

typedef struct {
    size_t size; /* sizeof(roll_component) */
    size_t kind;
    roll_str name;
    roll_str summary;
    roll_option_list options;
    const void *data; /* given to `make` and `plan` */
    /* `options` is a JSON object that holds every option; kinds and unknown keys were checked. */
    uint32_t (*make)(const void *data, roll_str options, const roll_context *context, roll_object *out,
                     roll_error *error);
    /* Null for rewards, which take no part in plans. */
    uint32_t (*plan)(const void *data, roll_str options, roll_str input, roll_text *out, roll_error *error);
} roll_component;

typedef struct {
    const roll_component *const *items;
    size_t len;
} roll_component_list;

/* All of it lives as long as the library. */
typedef struct {
    size_t size; /* sizeof(roll_plugin) */
    roll_str name, version, authors, about;
    roll_component_list components;
} roll_plugin;

/* Lives as long as the process. */
typedef struct {
    size_t size;
    const void *state; /* given to its functions */
    void (*log)(const void *state, uint32_t level, roll_str target, roll_str message);
    uint32_t (*log_level)(const void *state); /* messages above it go nowhere now */
} roll_host;

/* Rewards */

typedef struct {
    roll_text name;
    uint32_t differentiable;
    uint32_t on_missing;
    double missing_value;
} roll_reward_facts;

/* Frames: f32 [T, 3, H, W], RGB, values in [-1, 1]. */
typedef struct {
    roll_tensor frames;
    double fps;
} roll_video;

typedef struct {
    uint32_t missing; /* 1: there was nothing to score, and `reason` says why */
    double value;     /* higher is better */
    roll_numbers details;
    roll_text reason;
    roll_pullback pullback;
} roll_score;

/* What the score is called in lines and metrics. */
typedef struct {
    roll_text label; /* a noun: "contrast" */
    roll_text alias; /* a second name; empty: none */
} roll_measure;

typedef struct {
    size_t size; /* sizeof(roll_reward_table) */
    uint32_t (*facts)(void *state, roll_reward_facts *out, roll_error *error);
    uint32_t (*prepare)(void *state, const roll_video *reference, roll_tensors *out, roll_error *error);
    /* `target` is what `prepare` gave; `record` 1: a pullback is wanted. */
    uint32_t (*score)(void *state, const roll_video *video, roll_str prompt, roll_tensor_list target, uint32_t record,
                      roll_score *out, roll_error *error);
    /* May be null. Text that is another one whenever `prepare` may give something else for the same reference: options,
     * networks. With it `data.cache_dir` keeps targets; null, or an empty text, keeps none. The host adds the contents
     * of the library itself. */
    uint32_t (*target_key)(void *state, roll_text *out, roll_error *error);
    /* May be null. */
    uint32_t (*measures)(void *state, roll_measure *out, roll_error *error);
    /* May be null. If the score is a weighted sum: the name of each term's score among the details, and its
     * weight. Algorithms that compare videos then normalise each term for itself. */
    uint32_t (*terms)(void *state, roll_numbers *out, roll_error *error);
    /* May be null, which is 1. Writes 0 if `prepare` does not look at the reference: the reward can then score rows without
     * a clip, for which `prepare` is not called and the target is empty. */
    uint32_t (*reads_reference)(void *state, uint32_t *out, roll_error *error);
} roll_reward_table;

#ifdef __cplusplus
}
#endif
#endif
