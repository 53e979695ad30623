// A PJRT plugin that has devices and compiles nothing. Its build is configured by macros: FUNCTIONS is the size of its
// function table, DEVICES the number of devices, CODE (a gRPC status code) and MESSAGE the error of every compilation,
// MAJOR and MINOR the version of its API. With NO_ROOM, every upload to its devices fails. With V6E, it has a topology
// of TPUs too, which takes no options. A struct is an array of words, as in fsdp-xla.
#include <stdint.h>
#include <string.h>

typedef uintptr_t word;

struct error {
    word code;
    const char *message;
};

static word told(word *a, word at, const char *text) {
    a[at] = (word)text;
    a[at + 1] = strlen(text);
    return 0;
}

static word succeed(word *a) { return 0; }
static word error_message(word *a) { return told(a, 3, ((struct error *)a[2])->message); }
static word error_code(word *a) { return a[3] = ((struct error *)a[2])->code, 0; }

static word attributes(word *a) {
    static const int64_t version[3] = {1, 9, 2};
    static const char name[] = "stablehlo_current_version";
    static word all[7] = {56, 0, 0, sizeof(name) - 1, 2, 0, 3};
    all[2] = (word)name;
    all[5] = (word)version;
    a[2] = (word)all;
    return a[3] = 1, 0;
}

#ifndef MAJOR
#define MAJOR 0
#endif
#ifndef MINOR
#define MINOR 70
#endif

static word device = 7;
static word devices[64];

static word list(word *a) {
    for (int i = 0; i < DEVICES; i++) devices[i] = (word)&device;
    a[3] = (word)devices;
    return a[4] = DEVICES, 0;
}

static word client(word *a) { return a[8] = 1, 0; }
static word platform(word *a) { return told(a, 3, "fake"); }

static word topology(word *a) {
    static struct error unknown = {3, "there are no such chips"};
    int known = a[3] == 6 && !memcmp((void *)a[2], "fake:4", 6);
#ifdef V6E
    known |= a[3] == 7 && !memcmp((void *)a[2], "v6e:2x2", 7) && !a[5];
#endif
    return known ? (a[6] = 1, 0) : (word)&unknown;
}

static word device_attributes(word *a) {
    static const char name[] = "device_memory_bytes_limit";
    static word memory[7] = {56, 0, 0, sizeof(name) - 1, 1, 1 << 20, 1};
    memory[2] = (word)name;
    a[4] = (word)memory;
    return a[3] = 1, 0;
}

static word id(word *a) { return a[3] = 0, 0; }
static word description(word *a) { return a[3] = (word)&device, 0; }
static word upload(word *a) {
#ifdef NO_ROOM
    static struct error full = {8, "the device is full"};
    return (word)&full;
#else
    return a[13] = 0, a[14] = 1, 0;
#endif
}

static word compile(word *a) {
    static struct error refused = {CODE, MESSAGE};
    return (word)&refused;
}

static struct {
    word size, extension, version_size, version_extension, version;
    word (*functions[100])(word *);
} table = {
    40 + 8 * FUNCTIONS, 0, 24, 0, MAJOR | (word)MINOR << 32,
    {[0] = succeed, [1] = error_message, [2] = error_code, [3] = succeed, [4] = attributes, [10] = client, [11] = succeed,
     [12] = platform, [14] = platform, [16] = list, [20] = compile, [22] = upload, [23] = id, [25] = device_attributes, [26] = platform,
     [29] = description, [58] = succeed, [82] = topology, [83] = succeed, [86] = list, [89] = compile},
};

void *GetPjrtApi(void) { return &table; }
