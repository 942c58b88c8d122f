// Counts the operators that a program calls in libtorch: what stands between two marks, by name.
//
// For the backend `libtorch`; see `scripts/count-launches`. Loaded before the program (LD_PRELOAD), it has ATen tell
// of every operator. `called` are those that the program calls, itself or through a derivative that ATen recorded;
// `within` are those that they call in turn.
//
// `count_mark(name)` appends what was counted since the last mark to the file that the variable ROLL_COUNTS names, one
// JSON object a line.
#include <ATen/record_function.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

using Counts = std::map<std::string, long>;

std::mutex lock;
Counts called, within;
auto since = std::chrono::steady_clock::now();

// How many operators a thread is in, and whether the outermost has copied.
thread_local long depth;
thread_local bool copied;

// Steps of a backward pass are told as if they were operators.
bool is_operator(const at::RecordFunction &operation) {
    return std::strncmp(operation.name(), "autograd::engine", 16) != 0;
}

// Those that give what they were given, unless it has to be another dtype or in another order.
bool may_copy(const std::string &name) {
    return name == "aten::to" || name == "aten::contiguous" || name == "aten::reshape" || name == "aten::flatten";
}

std::unique_ptr<at::ObserverContext> entered(const at::RecordFunction &operation) {
    if (!is_operator(operation)) return nullptr;
    if (depth++ == 0) {
        copied = false;
        return nullptr;
    }
    copied = copied || !std::strcmp(operation.name(), "aten::copy_");
    std::lock_guard<std::mutex> guard(lock);
    within[operation.name()]++;
    return nullptr;
}

void left(const at::RecordFunction &operation, at::ObserverContext *) {
    if (!is_operator(operation) || depth == 0 || --depth > 0) return;
    std::string name = operation.name();
    if (copied && may_copy(name)) name += " (copies)";
    std::lock_guard<std::mutex> guard(lock);
    called[name]++;
}

void write(FILE *file, const char *kind, const Counts &counts) {
    std::fprintf(file, ", \"%s\": {", kind);
    const char *separator = "";
    for (const auto &[name, count] : counts) {
        std::fprintf(file, "%s\"%s\": %ld", separator, name.c_str(), count);
        separator = ", ";
    }
    std::fputs("}", file);
}

const auto handle = at::addGlobalCallback(
    at::RecordFunctionCallback(entered, left).scopes({at::RecordScope::FUNCTION}));

}  // namespace

extern "C" __attribute__((visibility("default"))) void count_mark(const char *name) {
    std::lock_guard<std::mutex> guard(lock);
    const auto now = std::chrono::steady_clock::now();
    const char *path = std::getenv("ROLL_COUNTS");
    if (FILE *file = path ? std::fopen(path, "a") : nullptr) {
        const double seconds = std::chrono::duration<double>(now - since).count();
        std::fprintf(file, "{\"phase\": \"%s\", \"seconds\": %.6f", name, seconds);
        write(file, "called", called);
        write(file, "within", within);
        std::fputs("}\n", file);
        std::fclose(file);
    }
    called.clear();
    within.clear();
    since = std::chrono::steady_clock::now();
}
