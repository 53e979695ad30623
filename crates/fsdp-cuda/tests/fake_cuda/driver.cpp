// A fake CUDA driver: device memory is host memory, and kernels are functions of shared objects.
//
// Streams are lazy: work is queued, and runs when something forces it or, at random, when more is queued. A seeded
// generator picks the stream that runs next; it respects only the order within each stream and waits for events, so a
// missing wait shows as wrong numbers. Freed memory is filled with NaN and quarantined before it is reused.
//
// It is stricter than the real driver: copies accept only device or pinned memory, almost every call needs a current
// context, and a write outside of an allocation aborts the process when the allocation is freed.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

enum Code { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101,
            INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700 };

constexpr int DEVICES = 512;

// FAKE_CUDA_DEVICES overrides the number of devices.
int device_count() {
    const char* devices = getenv("FAKE_CUDA_DEVICES");
    return devices ? atoi(devices) : DEVICES;
}

constexpr int GREATEST_PRIORITY = -5;
constexpr size_t GUARD = 256;
constexpr unsigned char CANARY = 0xa5;
constexpr size_t QUARANTINE = 64 << 20;

struct Marker { bool happened = false; };

struct Operation {
    std::function<void()> run;
    std::shared_ptr<Marker> waits_for;
};

struct Device;

struct Stream {
    Device* device;
    int priority;
    std::deque<Operation> queue;
};

struct Event {
    Device* device;
    bool timed;
    std::shared_ptr<Marker> marker;
};

struct Failure { std::string call; int countdown; int code; };

struct Device {
    int ordinal = 0;
    uint64_t random = 0;
    size_t capacity = size_t(1) << 30;
    size_t used = 0;
    int sticky = 0;
    std::map<uint64_t, size_t> blocks;
    std::vector<Stream*> streams;
    std::vector<Failure> failures;
    std::map<std::string, int> calls;
    // Digest of the addresses of this device that were passed to calls.
    uint64_t addresses = 0;

    void given(uint64_t address) {
        auto next = blocks.upper_bound(address);
        if (next == blocks.begin() || address >= std::prev(next)->first + std::prev(next)->second) return;
        addresses = (addresses ^ address) * 0x100000001b3ull;
    }

    uint64_t next() {
        random += 0x9e3779b97f4a7c15ull;
        uint64_t z = random;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }

    // Runs one operation of a stream that is not blocked; returns whether there was one.
    bool step() {
        std::vector<Stream*> ready;
        for (Stream* stream : streams) {
            if (stream->queue.empty()) continue;
            auto& waits_for = stream->queue.front().waits_for;
            if (!waits_for || waits_for->happened) ready.push_back(stream);
        }
        if (ready.empty()) return false;
        Stream* stream = ready[next() % ready.size()];
        Operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        if (operation.run) operation.run();
        return true;
    }

    template <class Done> void force(Done done) {
        while (!done()) {
            if (!step()) {
                fprintf(stderr, "fake CUDA: work waits for an event that cannot happen\n");
                abort();
            }
        }
    }

    void enqueue(Stream* stream, Operation operation) {
        stream->queue.push_back(std::move(operation));
        while (next() % 4 == 0 && step()) {}
    }
};

std::mutex lock;
Device devices[DEVICES];
std::map<uint64_t, size_t> pinned;
thread_local Device* current = nullptr;

bool within(const std::map<uint64_t, size_t>& blocks, uint64_t address, size_t bytes) {
    auto next = blocks.upper_bound(address);
    if (next == blocks.begin()) return false;
    auto block = std::prev(next);
    return address + bytes <= block->first + block->second;
}

uint64_t new_block(size_t bytes) {
    auto* start = static_cast<unsigned char*>(aligned_alloc(256, (bytes + 2 * GUARD + 255) / 256 * 256));
    memset(start, CANARY, GUARD);
    memset(start + GUARD, 0xcd, bytes);
    memset(start + GUARD + bytes, CANARY, GUARD);
    return reinterpret_cast<uint64_t>(start + GUARD);
}

std::deque<std::pair<void*, size_t>> freed;
size_t freed_bytes = 0;

// Frees a block after a quarantine, during which a late read finds NaN.
void old_block(uint64_t address, size_t bytes) {
    auto* start = reinterpret_cast<unsigned char*>(address) - GUARD;
    for (size_t i = 0; i < GUARD; i++) {
        if (start[i] != CANARY || start[GUARD + bytes + i] != CANARY) {
            fprintf(stderr, "fake CUDA: something was written outside of a block of %zu bytes\n", bytes);
            abort();
        }
    }
    memset(start + GUARD, 0xff, bytes);
    freed.push_back({start, bytes});
    freed_bytes += bytes;
    while (freed_bytes > QUARANTINE) {
        free(freed.front().first);
        freed_bytes -= freed.front().second;
        freed.pop_front();
    }
}

// Counts a call, and returns the code that it must fail with.
int entered(const char* call, Device* device) {
    if (!device) return INVALID_CONTEXT;
    if (device->sticky) return device->sticky;
    device->calls[call]++;
    for (auto& failure : device->failures) {
        if (failure.call == call && failure.countdown-- == 0) {
            if (failure.code == ILLEGAL_ADDRESS) device->sticky = failure.code;
            return failure.code;
        }
    }
    return SUCCESS;
}

struct Module { void* object; };
typedef void (*Kernel)(const unsigned*, const unsigned*, void**, uint64_t);
struct Function { Kernel run; size_t (*sizes)(size_t*); };

}  // namespace

#define ENTER(call) \
    std::lock_guard<std::mutex> guard(lock); \
    if (int code = entered(call, current)) return code

extern "C" {

// Controls for tests.

void fake_cuda_seed(int device, uint64_t seed) {
    std::lock_guard<std::mutex> guard(lock);
    devices[device].random = seed;
}

void fake_cuda_capacity(int device, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    devices[device].capacity = bytes;
}

// The priority of a stream; smaller numbers are higher priorities.
int fake_cuda_priority(void* stream) {
    std::lock_guard<std::mutex> guard(lock);
    return static_cast<Stream*>(stream)->priority;
}

// Makes a call of this name fail, after `skip` further ones that do not.
void fake_cuda_fail(int device, const char* call, int skip, int code) {
    std::lock_guard<std::mutex> guard(lock);
    devices[device].failures.push_back({call, skip, code});
}

int fake_cuda_calls(int device, const char* call) {
    std::lock_guard<std::mutex> guard(lock);
    return devices[device].calls[call];
}

// Digest of the addresses passed to copies and kernels since the previous call.
uint64_t fake_cuda_addresses(int device) {
    std::lock_guard<std::mutex> guard(lock);
    return std::exchange(devices[device].addresses, 0);
}

// The driver.

int cuInit(unsigned) {
    // Like the real driver, which does not initialize without a device.
    if (device_count() == 0) return NO_DEVICE;
    for (int i = 0; i < DEVICES; i++) {
        devices[i].ordinal = i;
        if (!devices[i].random) devices[i].random = i;
    }
    return SUCCESS;
}

int cuDriverGetVersion(int* version) { *version = 13000; return SUCCESS; }

int cuGetErrorName(int code, const char** name) {
    switch (code) {
        case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
        case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
        case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
        case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
        case INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; break;
        case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; break;
        case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
        default: return INVALID_VALUE;
    }
    return SUCCESS;
}

int cuGetErrorString(int, const char** text) { *text = "the fake was told to fail, or refused"; return SUCCESS; }

int cuDeviceGetCount(int* count) {
    *count = device_count();
    return SUCCESS;
}

int cuDeviceGet(int* device, int ordinal) {
    if (ordinal < 0 || ordinal >= DEVICES) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 16: *value = 4; return SUCCESS;
        case 75: *value = 9; return SUCCESS;
        case 76: *value = 0; return SUCCESS;
        default: return INVALID_VALUE;
    }
}

int cuDeviceGetName(char* name, int len, int device) { snprintf(name, len, "Fake GPU %d", device); return SUCCESS; }

int cuDeviceGetUuid_v2(char* uuid, int device) {
    memset(uuid, 0, 16);
    memcpy(uuid, &device, sizeof device);
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = devices[device].capacity; return SUCCESS; }

int cuDevicePrimaryCtxRetain(void** context, int device) { *context = &devices[device]; return SUCCESS; }

int cuCtxSetCurrent(void* context) { current = static_cast<Device*>(context); return SUCCESS; }

int cuCtxSynchronize() {
    ENTER("cuCtxSynchronize");
    current->force([] {
        for (Stream* stream : current->streams) if (!stream->queue.empty()) return false;
        return true;
    });
    return SUCCESS;
}

int cuMemGetInfo_v2(size_t* free, size_t* total) {
    ENTER("cuMemGetInfo");
    *free = current->capacity - current->used;
    *total = current->capacity;
    return SUCCESS;
}

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    ENTER("cuMemAlloc");
    if (bytes == 0) return INVALID_VALUE;
    if (current->used + bytes > current->capacity) return OUT_OF_MEMORY;
    *address = new_block(bytes);
    current->used += bytes;
    current->blocks[*address] = bytes;
    return SUCCESS;
}

int cuMemFree_v2(uint64_t address) {
    ENTER("cuMemFree");
    auto block = current->blocks.find(address);
    if (block == current->blocks.end()) return INVALID_VALUE;
    old_block(address, block->second);
    current->used -= block->second;
    current->blocks.erase(block);
    return SUCCESS;
}

int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
    ENTER("cuMemHostAlloc");
    uint64_t start = new_block(bytes);
    pinned[start] = bytes;
    *address = reinterpret_cast<void*>(start);
    return SUCCESS;
}

int cuMemFreeHost(void* address) {
    ENTER("cuMemFreeHost");
    auto block = pinned.find(reinterpret_cast<uint64_t>(address));
    if (block == pinned.end()) return INVALID_VALUE;
    old_block(block->first, block->second);
    pinned.erase(block);
    return SUCCESS;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    ENTER("cuCtxGetStreamPriorityRange");
    *least = 0;
    *greatest = GREATEST_PRIORITY;
    return SUCCESS;
}

// Stricter than the real driver: it refuses priorities outside of the range, and streams that synchronize with the
// default stream.
int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
    ENTER("cuStreamCreateWithPriority");
    if (flags != 1 || priority > 0 || priority < GREATEST_PRIORITY) return INVALID_VALUE;
    auto* created = new Stream{current, priority, {}};
    current->streams.push_back(created);
    *stream = created;
    return SUCCESS;
}

int cuStreamDestroy_v2(void* handle) {
    ENTER("cuStreamDestroy");
    auto* stream = static_cast<Stream*>(handle);
    current->force([&] { return stream->queue.empty(); });
    auto& streams = current->streams;
    for (size_t i = 0; i < streams.size(); i++) if (streams[i] == stream) streams.erase(streams.begin() + i);
    delete stream;
    return SUCCESS;
}

int cuStreamSynchronize(void* handle) {
    ENTER("cuStreamSynchronize");
    auto* stream = static_cast<Stream*>(handle);
    if (!stream || stream->device != current) return INVALID_HANDLE;
    current->force([&] { return stream->queue.empty(); });
    return SUCCESS;
}

int cuStreamWaitEvent(void* handle, void* event, unsigned) {
    ENTER("cuStreamWaitEvent");
    auto* stream = static_cast<Stream*>(handle);
    if (!stream || stream->device != current) return INVALID_HANDLE;
    auto marker = static_cast<Event*>(event)->marker;
    if (marker) current->enqueue(stream, {nullptr, marker});
    return SUCCESS;
}

int cuEventCreate(void** event, unsigned flags) {
    ENTER("cuEventCreate");
    *event = new Event{current, (flags & 2) == 0, nullptr};
    return SUCCESS;
}

int cuEventDestroy_v2(void* event) {
    ENTER("cuEventDestroy");
    delete static_cast<Event*>(event);
    return SUCCESS;
}

int cuEventRecord(void* handle, void* stream_handle) {
    ENTER("cuEventRecord");
    auto* stream = static_cast<Stream*>(stream_handle);
    auto* event = static_cast<Event*>(handle);
    if (!stream || stream->device != current || event->device != current) return INVALID_HANDLE;
    auto marker = std::make_shared<Marker>();
    event->marker = marker;
    current->enqueue(stream, {[marker] { marker->happened = true; }, nullptr});
    return SUCCESS;
}

int cuEventSynchronize(void* handle) {
    ENTER("cuEventSynchronize");
    auto marker = static_cast<Event*>(handle)->marker;
    if (marker) current->force([&] { return marker->happened; });
    return SUCCESS;
}

int cuEventQuery(void* handle) {
    ENTER("cuEventQuery");
    auto marker = static_cast<Event*>(handle)->marker;
    if (!marker || marker->happened) return SUCCESS;
    // Makes progress, so that a polling caller sees the event complete.
    current->step();
    return NOT_READY;
}

int cuEventElapsedTime_v2(float* milliseconds, void* start, void* end) {
    ENTER("cuEventElapsedTime");
    for (auto* event : {static_cast<Event*>(start), static_cast<Event*>(end)}) {
        if (!event->timed) return INVALID_HANDLE;
        if (!event->marker || !event->marker->happened) return NOT_READY;
    }
    *milliseconds = 1.0f;
    return SUCCESS;
}

int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t bytes, void* handle) {
    ENTER("cuMemcpyAsync");
    auto* stream = static_cast<Stream*>(handle);
    if (!stream || stream->device != current) return INVALID_HANDLE;
    for (uint64_t address : {dst, src}) {
        if (!within(current->blocks, address, bytes) && !within(pinned, address, bytes)) return INVALID_VALUE;
        current->given(address);
    }
    current->enqueue(stream, {[=] {
        memmove(reinterpret_cast<void*>(dst), reinterpret_cast<void*>(src), bytes);
    }, nullptr});
    return SUCCESS;
}

int cuMemsetD8Async(uint64_t dst, unsigned char byte, size_t bytes, void* handle) {
    ENTER("cuMemsetD8Async");
    auto* stream = static_cast<Stream*>(handle);
    if (!stream || stream->device != current) return INVALID_HANDLE;
    if (!within(current->blocks, dst, bytes) && !within(pinned, dst, bytes)) return INVALID_VALUE;
    current->given(dst);
    current->enqueue(stream, {[=] { memset(reinterpret_cast<void*>(dst), byte, bytes); }, nullptr});
    return SUCCESS;
}

int cuModuleLoadData(void** module, const void* image) {
    ENTER("cuModuleLoadData");
    const char* text = static_cast<const char*>(image);
    if (strncmp(text, "FAKE ", 5) != 0) return INVALID_VALUE;
    void* object = dlopen(text + 5, RTLD_NOW | RTLD_LOCAL);
    if (!object) {
        fprintf(stderr, "fake CUDA: %s\n", dlerror());
        return INVALID_VALUE;
    }
    *module = new Module{object};
    return SUCCESS;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
    ENTER("cuModuleGetFunction");
    void* object = static_cast<Module*>(module)->object;
    auto run = reinterpret_cast<Kernel>(dlsym(object, (std::string("fake_run_") + name).c_str()));
    auto sizes = reinterpret_cast<size_t (*)(size_t*)>(dlsym(object, (std::string("fake_sizes_") + name).c_str()));
    if (!run || !sizes) return NOT_FOUND;
    *function = new Function{run, sizes};
    return SUCCESS;
}

int cuLaunchKernel(void* handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned, void* stream_handle, void** params, void**) {
    ENTER("cuLaunchKernel");
    auto* stream = static_cast<Stream*>(stream_handle);
    if (!stream || stream->device != current) return INVALID_HANDLE;
    if (gx == 0 || gy > 65535 || bx == 0 || bx * by * bz > 1024) return INVALID_VALUE;
    auto* function = static_cast<Function*>(handle);
    size_t sizes[64];
    size_t count = function->sizes(sizes);
    // Like the real driver, copies the parameters before the call returns.
    auto values = std::make_shared<std::vector<uint64_t>>();
    for (size_t i = 0; i < count; i++) {
        uint64_t value = 0;
        memcpy(&value, params[i], sizes[i]);
        values->push_back(value);
        if (sizes[i] == sizeof value) current->given(value);
    }
    uint64_t seed = current->next();
    auto run = function->run;
    current->enqueue(stream, {[=] {
        unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
        std::vector<void*> pointers;
        for (auto& value : *values) pointers.push_back(&value);
        run(grid, block, pointers.data(), seed);
    }, nullptr});
    return SUCCESS;
}

}  // extern "C"
