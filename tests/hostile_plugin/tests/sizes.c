/* A plugin whose structures say sizes that the tests choose. */
#include "roll_plugin.h"

#ifndef TABLE_SIZE
#define TABLE_SIZE sizeof(roll_reward_table)
#endif
#ifndef COMPONENT_SIZE
#define COMPONENT_SIZE sizeof(roll_component)
#endif
#ifndef PLUGIN_SIZE
#define PLUGIN_SIZE sizeof(roll_plugin)
#endif
#ifndef COMPONENTS
#define COMPONENTS 1
#endif
#ifndef KIND
#define KIND ROLL_KIND_REWARD
#endif
#ifndef SCORE
#define SCORE score
#endif
#ifndef MINOR
#define MINOR 0
#endif
#ifndef PLAN
#define PLAN "{}"
#endif

static uint32_t facts(void *state, roll_reward_facts *out, roll_error *error) {
    roll_reward_facts own = {{"sizes", 5, NULL, NULL}, 0, ROLL_MISSING_SKIP, 0.0};
    (void)state, (void)error;
    *out = own;
    return ROLL_OK;
}

static uint32_t prepare(void *state, const roll_video *reference, roll_tensors *out, roll_error *error) {
    (void)state, (void)reference, (void)out, (void)error;
    return ROLL_OK;
}

uint32_t score(void *state, const roll_video *video, roll_str prompt, roll_tensor_list target, uint32_t record,
               roll_score *out, roll_error *error) {
    (void)state, (void)prompt, (void)target, (void)record, (void)error;
    out->value = video->fps;
    return ROLL_OK;
}

static uint32_t measures(void *state, roll_measure *out, roll_error *error) {
    roll_text label = {"size", 4, NULL, NULL};
    (void)state, (void)error;
    out->label = label;
    return ROLL_OK;
}

/* What a later version may have behind it. */
static const struct {
    roll_reward_table table;
    void *more[4];
} longer = {{TABLE_SIZE, facts, prepare, SCORE, NULL, measures, NULL, NULL}, {NULL, NULL, NULL, NULL}};

static uint32_t make(const void *data, roll_str options, const roll_context *context, roll_object *out,
                     roll_error *error) {
    roll_object own = {NULL, &longer, NULL};
    (void)data, (void)options, (void)error;
    if (!ROLL_HAS(context, roll_context, ranks)) return ROLL_FAILED;
    *out = own;
    return ROLL_OK;
}

static uint32_t plan(const void *data, roll_str options, roll_str input, roll_text *out, roll_error *error) {
    roll_text own = {PLAN, sizeof(PLAN) - 1, NULL, NULL};
    (void)data, (void)options, (void)input, (void)error;
    *out = own;
    return ROLL_OK;
}

static const struct {
    roll_component component;
    void *more[4];
} component = {{COMPONENT_SIZE, KIND, ROLL_STR("sizes"), ROLL_STR("Lies"), {NULL, 0}, NULL, make, plan},
               {NULL, NULL, NULL, NULL}};

static const roll_component *const components[] = {&component.component, NULL};

static const struct {
    roll_plugin plugin;
    void *more[4];
} plugin = {{PLUGIN_SIZE, ROLL_STR("sizes"), ROLL_STR("1"), ROLL_STR(""), ROLL_STR(""), {components, COMPONENTS}},
            {NULL, NULL, NULL, NULL}};

const roll_abi roll_plugin_abi = {{'R', 'O', 'L', 'L', 'P', 'L', 'U', 'G'}, 1, MINOR};

uint32_t roll_plugin_init(const roll_host *host, const roll_plugin **out, roll_error *error) {
    (void)error;
    if (!ROLL_HAS(host, roll_host, log_level)) return ROLL_FAILED;
    *out = &plugin.plugin;
    return ROLL_OK;
}
