// A PJRT plugin whose clients are joined: each process of a run has some of the devices of one program. It wraps a CPU
// plugin, whose path is in FSDP_TEST_PJRT, and moves all data between processes through the key-value store that it is
// given.
//
// Each process holds a client of the wrapped plugin with the devices of all processes, and exposes its own. To run a
// program it puts the arguments of its devices into the store, gets those of the other processes, and runs the whole
// program: its results are then those of one process with all devices, bit for bit. A struct is an array of words, as
// in fsdp-xla.
//
// Its devices are not of the kind of processors ("cpu"), so losses are read one step late.
//
// Environment variables:
// - JOINING_DEVICES: number of devices of each process.
// - JOINING_REVERSED: the last process has the first devices.
// - JOINING_SILENT: number of a process that does not announce its devices.
// - JOINING_APART: each process acts as the first of a world of one process.
// - JOINING_ELSEWHERE: programs are reported to run on the devices of another process.
// - JOINING_WAIT_MS: how long the processes that are not silent wait for a key.
// - JOINING_VERSION: version of the plugin.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uintptr_t word;
typedef word function(word *);
typedef word make_error(int code, const char *message, size_t length);

enum {
    ERROR_DESTROY, ERROR_MESSAGE, ERROR_CODE, EVENT_DESTROY = 5, EVENT_AWAIT = 8, CREATE = 10, PLATFORM = 12, VERSION = 14, ADDRESSABLE = 16,
    UPLOAD = 22, KIND = 26, PROGRAM_DEVICES = 52, EXECUTE = 55, BUFFER_DESTROY = 58, ELEMENT = 59, DIMENSIONS = 60, DOWNLOAD = 70
};
enum { MOST_DEVICES = 16 };

// The functions follow five header words.
static word table[512], real[512];
static struct { word size, type, next; } for_gpus = {24, 0, 0};

static word node, nodes = 1, own, all, client, *devices, *store;
static int wait_ms = 600000;

static word call(int number, word *a) { return ((function *)real[5 + number])(a); }

// Errors of this plugin; all others belong to the wrapped plugin.
struct error {
    const char *ours;
    word code, length;
    char text[];
};
static const char mark[] = "ours";

static word fail(int code, const char *message, size_t length) {
    struct error *error = malloc(sizeof(*error) + length);
    error->ours = mark, error->code = code, error->length = length;
    memcpy(error->text, message, length);
    return (word)error;
}

static struct error *ours(word *a) {
    struct error *error = (struct error *)a[2];
    return error && error->ours == mark ? error : NULL;
}

static word error_destroy(word *a) { return ours(a) ? free(ours(a)), 0 : call(ERROR_DESTROY, a); }
static word error_code(word *a) { return ours(a) ? a[3] = ours(a)->code, 0 : call(ERROR_CODE, a); }
static word error_message(word *a) {
    return ours(a) ? a[3] = (word)ours(a)->text, a[4] = ours(a)->length, 0 : call(ERROR_MESSAGE, a);
}

static void expect(int holds, const char *what) {
    if (!holds) fprintf(stderr, "joining plugin: %s\n", what), abort();
}

static void done(word error) { expect(!error, "the wrapped plugin has failed"); }

static make_error *const makes = fail;

// The store callbacks are in the arguments of client creation, from word 4.
static word put(const char *key, const void *value, size_t length) {
    word a[8] = {64, 0, (word)key, strlen(key), (word)value, length, (word)&makes, store[7]};
    return ((function *)store[6])(a);
}

static word get(const char *key, void **value, size_t *length) {
    word a[10] = {80, 0, (word)key, strlen(key), wait_ms, (word)&makes, store[5]};
    word error = ((function *)store[4])(a);
    if (error) return error;
    *value = memcpy(malloc(a[8] + 1), (void *)a[7], *length = a[8]);
    ((void (*)(word))a[9])(a[7]);
    return 0;
}

// Checks that getting an unknown key returns NOT_FOUND (5).
static void expect_nothing(const char *key) {
    word a[9] = {72, 0, (word)key, strlen(key), (word)&makes, store[10]};
    struct error *error = (struct error *)((function *)store[9])(a);
    expect(error && error->code == 5, "a key without a value is not said to be one");
    free(error);
}

static word environment(const char *name, word otherwise) { return getenv(name) ? strtoul(getenv(name), NULL, 10) : otherwise; }

static word option(word *a, const char *name, word otherwise) {
    for (word *value = (word *)a[2], i = 0; i < a[3]; i++, value += 7)
        if (value[3] == strlen(name) && !memcmp((void *)value[2], name, value[3])) return value[5];
    return otherwise;
}

// Announces the number of devices of this process, and checks that all others announce the same number.
static word meet(void) {
    char key[32];
    expect_nothing("nowhere");
    sprintf(key, "devices of %zu", (size_t)node);
    word error = environment("JOINING_SILENT", nodes) == node ? 0 : put(key, &own, sizeof(own));
    for (word other = 0; other < nodes && !error; other++) {
        void *value;
        size_t length;
        sprintf(key, "devices of %zu", (size_t)other);
        if ((error = get(key, &value, &length))) return error;
        expect(length == sizeof(own) && !memcmp(value, &own, length), "processes have different numbers of devices");
        free(value);
    }
    return error;
}

static word create(word *a) {
    own = environment("JOINING_DEVICES", 1);
    if (!getenv("JOINING_APART")) node = option(a, "node_id", 0), nodes = option(a, "num_nodes", 1);
    if (environment("JOINING_SILENT", nodes) != node) wait_ms = environment("JOINING_WAIT_MS", wait_ms);
    if ((all = own * nodes) > MOST_DEVICES) return fail(3, "too many devices", 16);
    if (nodes > 1) {
        store = memcpy(malloc(88), a, 88);
        word error = meet();
        if (error) return error;
    }
    static const char name[] = "cpu_device_count";
    word count[7] = {56, 0, (word)name, sizeof(name) - 1, 1, all, 1};
    word made[11] = {88, 0, (word)count, 1};
    word error = call(CREATE, made);
    word list[5] = {40, 0, client = a[8] = made[8]};
    if (error || (error = call(ADDRESSABLE, list))) return error;
    expect(list[4] == all, "the wrapped plugin has other devices than were asked for");
    devices = (word *)list[3];
    return 0;
}

static word platform(word *a) {
    static const char name[] = "joining";
    return a[3] = (word)name, a[4] = sizeof(name) - 1, 0;
}

static word kind(word *a) {
    static const char name[] = "joined";
    return a[3] = (word)name, a[4] = sizeof(name) - 1, 0;
}

static word version(word *a) {
    const char *said = getenv("JOINING_VERSION");
    return said ? a[3] = (word)said, a[4] = strlen(said), 0 : call(VERSION, a);
}

static word *devices_of(word process) {
    return devices + own * (getenv("JOINING_REVERSED") ? nodes - 1 - process : process);
}

static word addressable(word *a) { return a[3] = (word)devices_of(node), a[4] = own, 0; }

static word program_devices(word *a) {
    word error = call(PROGRAM_DEVICES, a);
    // Devices are in rank order, as arguments are.
    if (!error && nodes > 1) {
        expect(a[4] == all, "a program runs on the devices of all processes");
        a[3] += 8 * own * (getenv("JOINING_ELSEWHERE") ? nodes - 1 - node : node), a[4] = own;
    }
    return error;
}

static size_t size_of(word buffer) {
    word a[7] = {56, 0, buffer};
    done(call(DOWNLOAD, a));
    return a[5];
}

static void download(word buffer, char *to, size_t length) {
    word a[7] = {56, 0, buffer, 0, (word)to, length};
    done(call(DOWNLOAD, a));
    word event[3] = {24, 0, a[6]};
    done(call(EVENT_AWAIT, event)), done(call(EVENT_DESTROY, event));
}

// Uploads bytes to a device, with the element type and dimensions of the buffer `like`.
static word upload(word like, const char *bytes, word device) {
    word element[4] = {32, 0, like}, shape[5] = {40, 0, like};
    done(call(ELEMENT, element)), done(call(DIMENSIONS, shape));
    word a[15] = {120, 0, client, (word)bytes, (uint32_t)element[3], shape[3], shape[4], [9] = 1, [10] = device};
    done(call(UPLOAD, a));
    word event[3] = {24, 0, a[13]};
    done(call(EVENT_AWAIT, event)), done(call(EVENT_DESTROY, event));
    return a[14];
}

static void destroy(word buffer) {
    word a[3] = {24, 0, buffer};
    done(call(BUFFER_DESTROY, a));
}

// Puts the arguments of all devices of this process under one key.
static word put_arguments(const char *key, word **lists, word count) {
    size_t length = 0, at = 0;
    for (word d = 0; d < own; d++)
        for (word i = 0; i < count; i++) length += size_of(lists[d][i]);
    char *bytes = malloc(length + 1);
    for (word d = 0; d < own; d++)
        for (word i = 0; i < count; i++) {
            size_t size = size_of(lists[d][i]);
            download(lists[d][i], bytes + at, size), at += size;
        }
    word error = put(key, bytes, length);
    return free(bytes), error;
}

// Gets the arguments of another process and uploads them to its devices.
static word get_arguments(const char *key, word **like, word **lists, word count, word process) {
    char *bytes;
    size_t length, at = 0;
    word error = get(key, (void **)&bytes, &length);
    if (error) return error;
    for (word d = 0; d < own; d++)
        for (word i = 0; i < count; i++) {
            lists[d][i] = upload(like[0][i], bytes + at, devices_of(process)[d]);
            at += size_of(like[0][i]);
        }
    expect(at == length, "processes give their devices different arguments");
    return free(bytes), 0;
}

static word execute(word *a) {
    static word runs;
    if (nodes == 1) return call(EXECUTE, a);
    word count = a[6], *lists[MOST_DEVICES], *results[MOST_DEVICES], error;
    word loaded[4] = {32, 0, a[2]}, outputs[4] = {32, 0};
    done(call(51, loaded)), outputs[2] = loaded[3], done(call(44, outputs)), done(call(40, (word[3]){24, 0, loaded[3]}));
    expect(a[5] == own, "a program is given arguments of the devices of this process");
    char key[64];
    sprintf(key, "run %zu of %zu", (size_t)runs, (size_t)node);
    if ((error = put_arguments(key, (word **)a[4], count))) return error;
    for (word other = 0; other < nodes; other++) {
        word first = other * own;
        for (word d = 0; d < own; d++) {
            lists[first + d] = other == node ? ((word **)a[4])[d] : malloc(8 * count + 8);
            results[first + d] = other == node ? ((word **)a[7])[d] : malloc(8 * outputs[3] + 8);
        }
        sprintf(key, "run %zu of %zu", (size_t)runs, (size_t)other);
        if (other != node && (error = get_arguments(key, (word **)a[4], lists + first, count, other))) return error;
    }
    word whole[10] = {80, 0, a[2], a[3], (word)lists, all, count, (word)results};
    if ((error = call(EXECUTE, whole))) return error;
    for (word d = 0; d < all; d++) {
        if (d / own == node) continue;
        for (word i = 0; i < count; i++) destroy(lists[d][i]);
        for (word i = 0; i < outputs[3]; i++) destroy(results[d][i]);
        free(lists[d]), free(results[d]);
    }
    return runs++, 0;
}

void *GetPjrtApi(void) {
    if (table[0]) return table;
    const char *path = getenv("FSDP_TEST_PJRT");
    void *library = path ? dlopen(path, RTLD_NOW) : NULL;
    expect(library != NULL, "FSDP_TEST_PJRT names no library");
    word *wrapped = ((word * (*)(void)) dlsym(library, "GetPjrtApi"))();
    expect(*wrapped <= sizeof(table), "the wrapped plugin has more functions than there is room for");
    memcpy(real, wrapped, *wrapped), memcpy(table, wrapped, *wrapped);
    // With the GPU custom call extension (type 0), fsdp-xla passes it the client options of GPU plugins.
    for_gpus.next = table[1], table[1] = (word)&for_gpus;
    static const struct { int number; function *own; } changed[] = {
        {ERROR_DESTROY, error_destroy}, {ERROR_MESSAGE, error_message}, {ERROR_CODE, error_code}, {CREATE, create},
        {PLATFORM, platform}, {VERSION, version}, {ADDRESSABLE, addressable}, {KIND, kind}, {PROGRAM_DEVICES, program_devices},
        {EXECUTE, execute},
    };
    for (size_t i = 0; i < sizeof(changed) / sizeof(changed[0]); i++) table[5 + changed[i].number] = (word)changed[i].own;
    return table;
}
