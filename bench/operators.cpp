// Seconds of each operator of libtorch that a program calls, between two marks.
//
// Loaded before the program (LD_PRELOAD); `scripts/gpu-pack` compiles it, and `scripts/gpu-check` runs `roll bench`
// with it. ATen reports every operator. An operator that the program calls itself, or through a derivative that ATen
// recorded, is timed together with the operators that it calls. On a GPU a CUDA event is recorded before and after each
// of them, in libtorch's stream. `between operators` are kernels that roll launches without ATen, and gaps.
//
// `roll bench` calls `roll_phase_ended(name)` after each phase. The times since the last call are then appended to the
// file in OPERATOR_TIMES, one JSON object a line: {"phase", "seconds", "operators": {name: [calls, seconds]}}.
#include <ATen/record_function.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Event = void *;

// CUDA's runtime, which libtorch has loaded; declared as in cuda_runtime_api.h.
template <typename F> F symbol(const char *name) { return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name)); }

struct Cuda {
    int (*count)(int *) = symbol<int (*)(int *)>("cudaGetDeviceCount");
    int (*create)(Event *) = symbol<int (*)(Event *)>("cudaEventCreate");
    int (*record)(Event, void *) = symbol<int (*)(Event, void *)>("cudaEventRecord");
    int (*synchronize)() = symbol<int (*)()>("cudaDeviceSynchronize");
    int (*elapsed)(float *, Event, Event) = symbol<int (*)(float *, Event, Event)>("cudaEventElapsedTime");
    bool there = false;

    Cuda() {
        int gpus = 0;
        there = count && create && record && synchronize && elapsed && count(&gpus) == 0 && gpus > 0;
    }
};

Cuda &cuda() {
    static Cuda found;
    return found;
}

// A moment in the stream of a GPU's kernels, or of this process.
struct Moment {
    Event event = nullptr;
    Clock::time_point time;
};

struct Call {
    std::string name;
    Moment begin, end;
};

std::mutex lock;
std::vector<Call> calls;
// Events of earlier phases: making them takes longer than recording them.
std::vector<Event> idle;

Moment now() {
    Moment moment;
    moment.time = Clock::now();
    if (!cuda().there) return moment;
    std::lock_guard<std::mutex> guard(lock);
    if (idle.empty()) {
        cuda().create(&moment.event);
    } else {
        moment.event = idle.back();
        idle.pop_back();
    }
    // The legacy default stream.
    cuda().record(moment.event, nullptr);
    return moment;
}

double between(const Moment &begin, const Moment &end) {
    float milliseconds = 0;
    const bool on_gpu = begin.event && end.event;
    if (on_gpu && cuda().elapsed(&milliseconds, begin.event, end.event) == 0) return milliseconds / 1e3;
    return std::chrono::duration<double>(end.time - begin.time).count();
}

// The operators that a thread is in.
thread_local long depth;
thread_local Moment began;

// Steps of a backward pass are reported as if they were operators.
bool is_operator(const at::RecordFunction &operation) {
    return std::strncmp(operation.name(), "autograd::engine", 16) != 0;
}

std::unique_ptr<at::ObserverContext> entered(const at::RecordFunction &operation) {
    if (is_operator(operation) && depth++ == 0) began = now();
    return nullptr;
}

void left(const at::RecordFunction &operation, at::ObserverContext *) {
    if (!is_operator(operation) || depth == 0 || --depth > 0) return;
    const Moment end = now();
    std::lock_guard<std::mutex> guard(lock);
    calls.push_back({operation.name(), began, end});
}

const auto handle = at::addGlobalCallback(
    at::RecordFunctionCallback(entered, left).scopes({at::RecordScope::FUNCTION}));

}  // namespace

extern "C" __attribute__((visibility("default"))) void roll_phase_ended(const char *phase) {
    if (cuda().there) cuda().synchronize();
    std::lock_guard<std::mutex> guard(lock);
    const char *path = std::getenv("OPERATOR_TIMES");
    FILE *file = path ? std::fopen(path, "a") : nullptr;
    if (file && !calls.empty()) {
        std::map<std::string, std::pair<long, double>> operators;
        for (size_t i = 0; i < calls.size(); i++) {
            const auto add = [&](const std::string &name, double seconds) {
                auto &[count, sum] = operators[name];
                count++;
                sum += seconds;
            };
            add(calls[i].name, between(calls[i].begin, calls[i].end));
            if (i > 0) add("between operators", std::max(0.0, between(calls[i - 1].end, calls[i].begin)));
        }
        const double seconds = between(calls.front().begin, calls.back().end);
        std::fprintf(file, "{\"phase\": \"%s\", \"gpu\": %s, \"seconds\": %.6f, \"operators\": {", phase,
                     cuda().there ? "true" : "false", seconds);
        const char *separator = "";
        for (const auto &[name, times] : operators) {
            std::fprintf(file, "%s\"%s\": [%ld, %.6f]", separator, name.c_str(), times.first, times.second);
            separator = ", ";
        }
        std::fputs("}}\n", file);
    }
    if (file) std::fclose(file);
    for (const Call &call : calls)
        for (const Moment &moment : {call.begin, call.end})
            if (moment.event) idle.push_back(moment.event);
    calls.clear();
}
