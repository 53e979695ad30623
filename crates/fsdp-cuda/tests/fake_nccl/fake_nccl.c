/* A fake libnccl over host memory, for ranks that are threads of one or several processes.
 *
 * It enforces the rules of NCCL that a caller can break: communicators are non-blocking; a call on a communicator that
 * is not ready is refused; operations run on streams and move data only once all ranks have entered them; a mismatch
 * hangs; an abort frees only the rank that called it. A log records every call and every broken rule ("VIOLATION").
 * Sums use the reduction tree of fsdp-core, so that results can be compared bit for bit.
 *
 * Streams belong to the caller. `fake_set_enqueue` sets the function that appends work to a stream. For streams that
 * cannot be appended to, `fake_set_finish` sets the function that waits for all earlier work; an operation then runs on
 * its own thread, and its communicator is in progress until it is done, as with NCCL while it connects.
 *
 * A clique holds the state that the ranks of a communicator share, including elements in transit. Processes with the
 * same folder in FAKE_NCCL_DIR map cliques from files in it, named by id; without the variable, they are in memory. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef FAKE_VERSION
#define FAKE_VERSION 22809
#endif
#ifndef DATA_MAX
#define DATA_MAX (1 << 16)
#endif

enum { SUCCESS = 0, INTERNAL = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, MESSAGES };
enum { SUM = 0, AVERAGE = 4 };
enum { MAX_RANKS = 16, MAX_SEGMENTS = 64, MAX_SPLITS = 16, SLOTS = 4, POLLS = 3 };

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
} ncclConfig_t;

/* For messages, a segment is what one rank, `root`, is sent; as much is received from it. */
typedef struct { size_t count, at; int dtype, root, reduction; } segment;

/* One rank's input to a collective. The elements of a segment begin at offset `at` of `data`. */
typedef struct {
    int entered, kind, segments;
    segment segment[MAX_SEGMENTS];
    char data[DATA_MAX];
} part;

/* A collective; it completes once all ranks have entered it with the same call. */
typedef struct {
    uint64_t sequence;
    int used, done, left;
    part part[MAX_RANKS];
} collective;

/* A split; it completes once all ranks have arrived. */
typedef struct { int color[MAX_RANKS], key[MAX_RANKS], arrived; } split;

/* State that the ranks of a communicator share across processes. */
typedef struct {
    pthread_mutex_t lock;
    uint64_t id;
    int size, joined, rank_joined[MAX_RANKS];
    collective slot[SLOTS];
    split splits[MAX_SPLITS];
} shared;

/* This process's mapping of a clique. */
typedef struct clique {
    shared *all;
    int users;
    struct clique *next;
} clique;

typedef struct ncclComm {
    clique *clique;
    int rank, world_rank, size;
    uint64_t id, issued, running, splits;
    int polls;               /* number of polls that still report "in progress" */
    int pending_split;       /* 1 + index of the split it takes part in; 0 for none */
    struct ncclComm **split_slot;
    int finalized, dead, aborted, async_error;
    int launching;           /* unfinished operations that run without a stream */
    struct ncclComm *next;
} *ncclComm_t;

typedef int (*enqueue_fn)(void *stream, void (*work)(void *), void *argument);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static uint64_t next_id = 1;
static clique *cliques;
static ncclComm_t comms;
static enqueue_fn enqueue;
static int (*finish)(void *stream);
static int refuse_calls;

/* The log. */
static char log_text[1 << 22];
static size_t log_len;

static void note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    size_t room = sizeof log_text - log_len;
    int len = vsnprintf(log_text + log_len, room, format, arguments);
    if (len > 0 && (size_t)len < room) log_len += len;
    va_end(arguments);
}

/* Copies the log to `out`, and returns its length in bytes. */
size_t fake_log(char *out, size_t room) {
    pthread_mutex_lock(&lock);
    size_t len = log_len < room ? log_len : room;
    memcpy(out, log_text, len);
    pthread_mutex_unlock(&lock);
    return log_len;
}

void fake_clear_log(void) {
    pthread_mutex_lock(&lock);
    log_len = 0;
    pthread_mutex_unlock(&lock);
}

void fake_set_enqueue(enqueue_fn function) { enqueue = function; }

void fake_set_finish(int (*function)(void *stream)) { finish = function; }

/* From now on, every communicator of this world rank reports `code` as its async error, and its operations hang. */
void fake_async_error(int world_rank, int code) {
    pthread_mutex_lock(&lock);
    for (ncclComm_t comm = comms; comm; comm = comm->next)
        if (comm->world_rank == world_rank && !comm->dead) comm->async_error = code;
    pthread_mutex_unlock(&lock);
}

/* From now on, collectives return `code`. */
void fake_refuse_calls(int code) { refuse_calls = code; }

/* Number of communicators that were neither destroyed nor aborted. */
int fake_live_comms(void) {
    int live = 0;
    pthread_mutex_lock(&lock);
    for (ncclComm_t comm = comms; comm; comm = comm->next) live += !comm->dead;
    pthread_mutex_unlock(&lock);
    return live;
}

/* Elements. */

static size_t size_of(int dtype) {
    switch (dtype) {
    case 3: case 7: return 4;
    case 4: case 8: return 8;
    case 6: case 9: return 2;
    case 1: return 1;
    default: return 0;
    }
}

static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_f16(uint16_t bits) {
    uint32_t wide = (uint32_t)(bits & 0x7fff) << 13;
    float value;
    memcpy(&value, &wide, 4);
    value *= 0x1p112f;
    if ((bits & 0x7c00) == 0x7c00) value = bits & 0x3ff ? NAN : INFINITY;
    return bits & 0x8000 ? -value : value;
}

static uint16_t to_f16(float value) {
    uint32_t bits, wide;
    memcpy(&bits, &value, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    float magnitude = value < 0 ? -value : value;
    if (value != value) return 0x7e00;
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    /* Adding this power of two rounds the value to the last bit of the result. */
    uint32_t exponent = bits >> 23 & 0xff;
    if (exponent < 113) exponent = 113;
    uint32_t power = (exponent + 13) << 23;
    float sum;
    memcpy(&sum, &power, 4);
    sum += magnitude;
    memcpy(&wide, &sum, 4);
    return sign | (uint16_t)(((exponent - 113) << 10) + (wide - power));
}

static void add(void *to, const void *from, size_t count, int dtype) {
    for (size_t i = 0; i < count; i++) {
        switch (dtype) {
        case 3: ((uint32_t *)to)[i] += ((const uint32_t *)from)[i]; break;
        case 4: ((uint64_t *)to)[i] += ((const uint64_t *)from)[i]; break;
        case 6: {
            uint16_t *out = (uint16_t *)to + i;
            *out = to_f16(from_f16(*out) + from_f16(((const uint16_t *)from)[i]));
            break;
        }
        case 7: ((float *)to)[i] += ((const float *)from)[i]; break;
        case 8: ((double *)to)[i] += ((const double *)from)[i]; break;
        case 9: {
            uint16_t *out = (uint16_t *)to + i;
            *out = to_bf16(from_bf16(*out) + from_bf16(((const uint16_t *)from)[i]));
        }
        }
    }
}

/* When it averages, NCCL multiplies the elements of every rank by this factor before it adds them; the factor has
   their dtype. */
static void divide(void *to, size_t count, int dtype, int ranks) {
    float single = (float)(1.0 / ranks), half = from_f16(to_f16(single)), brain = from_bf16(to_bf16(single));
    for (size_t i = 0; i < count; i++) {
        switch (dtype) {
        case 6: ((uint16_t *)to)[i] = to_f16(from_f16(((uint16_t *)to)[i]) * half); break;
        case 7: ((float *)to)[i] *= single; break;
        case 8: ((double *)to)[i] *= 1.0 / ranks; break;
        case 9: ((uint16_t *)to)[i] = to_bf16(from_bf16(((uint16_t *)to)[i]) * brain);
        }
    }
}

/* Tree sum over the ranks start..start + ranks of `all`: the largest power of two below `ranks` goes left. */
static void *tree(collective *op, int at, size_t skip, size_t count, int start, int ranks, int all) {
    segment *mine = &op->part[start].segment[at];
    size_t bytes = count * size_of(mine->dtype);
    if (ranks == 1) {
        char *copy = malloc(bytes + 1);
        memcpy(copy, op->part[start].data + mine->at + skip * size_of(mine->dtype), bytes);
        if (mine->reduction == AVERAGE) divide(copy, count, mine->dtype, all);
        return copy;
    }
    int left = 1;
    while (2 * left < ranks) left *= 2;
    void *sum = tree(op, at, skip, count, start, left, all);
    void *right = tree(op, at, skip, count, start + left, ranks - left, all);
    add(sum, right, count, mine->dtype);
    free(right);
    return sum;
}

/* The message of one rank to another that comes after so many others. */
static segment *message(part *from, int to, int earlier) {
    for (int at = 0; at < from->segments; at++)
        if (from->segment[at].root == to && earlier-- == 0) return &from->segment[at];
    return NULL;
}

/* Copies the results of a collective to the buffers of a rank. */
static void take_out(shared *group, collective *op, int rank, void *const *to) {
    part *mine = &op->part[rank];
    for (int at = 0; at < mine->segments; at++) {
        segment *own = &mine->segment[at];
        size_t count = own->count, bytes = count * size_of(own->dtype);
        if (mine->kind == ALL_GATHER) {
            for (int from = 0; from < group->size; from++)
                memcpy((char *)to[at] + from * bytes, op->part[from].data + op->part[from].segment[at].at, bytes);
        } else if (mine->kind == MESSAGES) {
            int earlier = 0;
            for (int other = 0; other < at; other++) earlier += mine->segment[other].root == own->root;
            part *from = &op->part[own->root];
            memcpy(to[at], from->data + message(from, rank, earlier)->at, bytes);
        } else if (mine->kind == BROADCAST) {
            part *root = &op->part[own->root];
            memcpy(to[at], root->data + root->segment[at].at, bytes);
        } else {
            size_t skip = mine->kind == REDUCE_SCATTER ? rank * count : 0;
            void *sum = tree(op, at, skip, count, 0, group->size, group->size);
            memcpy(to[at], sum, bytes);
            free(sum);
        }
    }
}

/* Whether all ranks have entered with the same call. With NCCL, a mismatch waits forever. */
static int complete(shared *group, collective *op) {
    for (int rank = 0; rank < group->size; rank++) {
        part *mine = &op->part[rank], *first = &op->part[0];
        if (!mine->entered || mine->kind != first->kind || mine->segments != first->segments) return 0;
        for (int at = 0; at < mine->segments; at++) {
            segment *ours = &mine->segment[at], *theirs = &first->segment[at];
            if (ours->count != theirs->count || ours->dtype != theirs->dtype || ours->root != theirs->root
                || ours->reduction != theirs->reduction) return 0;
        }
    }
    return 1;
}

/* If a process was killed while it held the lock, the world has failed, so the state it left need not be consistent. */
static void hold(shared *group) {
    if (pthread_mutex_lock(&group->lock) == EOWNERDEAD) pthread_mutex_consistent(&group->lock);
}

static void let_go(shared *group) { pthread_mutex_unlock(&group->lock); }

/* Drops the clique of a communicator that is dead and on which nothing runs. Call with `lock` held. */
static void release(ncclComm_t comm) {
    if (!comm->dead || comm->running || !comm->clique) return;
    clique *group = comm->clique;
    comm->clique = NULL;
    if (--group->users) return;
    clique **at = &cliques;
    while (*at != group) at = &(*at)->next;
    *at = group->next;
    munmap(group->all, sizeof *group->all);
    free(group);
}

/* Operations. */

typedef struct {
    ncclComm_t comm;
    uint64_t sequence;
    int kind, segments, without_stream;
    segment segment[MAX_SEGMENTS];
    const void *from[MAX_SEGMENTS];
    void *to[MAX_SEGMENTS];
} launch;

/* Bytes of a rank's input to a segment, whose count is that of the smaller of input and output. */
static size_t brought(launch *work, int at) {
    size_t ranks = work->kind == REDUCE_SCATTER ? work->comm->size : 1;
    return ranks * work->segment[at].count * size_of(work->segment[at].dtype);
}

static void enter(launch *work, collective *op) {
    part *mine = &op->part[work->comm->rank];
    op->used = 1;
    op->sequence = work->sequence;
    mine->kind = work->kind;
    mine->segments = work->segments;
    for (int at = 0; at < work->segments; at++) {
        mine->segment[at] = work->segment[at];
        memcpy(mine->data + work->segment[at].at, work->from[at], brought(work, at));
    }
    mine->entered = 1;
}

/* Polls the collective once; returns 1 when the operation has ended. */
static int look(launch *work, int *entered) {
    ncclComm_t comm = work->comm;
    shared *group = comm->clique->all;
    collective *op = &group->slot[work->sequence % SLOTS];
    int ended = 0;
    hold(group);
    int is_free = !op->used || op->sequence == work->sequence;
    if (!*entered && !comm->aborted && !comm->async_error && is_free) {
        enter(work, op);
        *entered = 1;
        if (complete(group, op)) op->done = 1;
    }
    if (*entered && op->done) {
        take_out(group, op, comm->rank, work->to);
        if (++op->left == group->size) {
            for (int rank = 0; rank < group->size; rank++) op->part[rank].entered = 0;
            op->used = op->done = op->left = 0;
        }
        ended = 1;
    } else if (comm->aborted) {
        if (*entered) op->part[comm->rank].entered = 0; /* its buffers may be freed now */
        ended = 1;
    }
    let_go(group);
    return ended;
}

/* Work on a stream: enters a collective, waits for the other ranks, and leaves. */
static void run(void *argument) {
    launch *work = argument;
    ncclComm_t comm = work->comm;
    int entered = 0;
    pthread_mutex_lock(&lock);
    while (!look(work, &entered)) {
        /* Threads of this process signal changes; poll for those of other processes. */
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 500000;
        if (until.tv_nsec >= 1000000000) { until.tv_sec++; until.tv_nsec -= 1000000000; }
        if (entered) pthread_cond_broadcast(&changed);
        pthread_cond_timedwait(&changed, &lock, &until);
    }
    comm->running--;
    if (work->without_stream) comm->launching--;
    release(comm);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    free(work);
}

static void *run_alone(void *argument) {
    run(argument);
    return NULL;
}

static __thread int depth, group_error;
static __thread launch *group_work;
static __thread void *group_stream;

static int alive(ncclComm_t comm, const char *call) {
    if (!comm || comm->dead) {
        note("VIOLATION %s on a communicator that is gone\n", call);
        return 0;
    }
    return 1;
}

/* Whether the communicator accepts a new call. */
static int ready(ncclComm_t comm, const char *call) {
    if (!alive(comm, call)) return 0;
    if (comm->polls || comm->pending_split || comm->launching || comm->clique->all->joined < comm->size) {
        note("VIOLATION %s on a communicator that is not ready\n", call);
        return 0;
    }
    return 1;
}

int ncclGroupStart(void) {
    depth++;
    return SUCCESS;
}

int ncclGroupEnd(void) {
    if (depth == 0) return INVALID_USAGE;
    if (--depth > 0) return SUCCESS;
    launch *work = group_work;
    int error = group_error;
    group_work = NULL;
    group_error = SUCCESS;
    for (int at = 0; work && work->kind == MESSAGES && at < work->segments; at++)
        if (!work->to[at]) error = INVALID_USAGE;
    if (error || !work) {
        free(work);
        return error;
    }
    static const char *names[] = { "all_gather", "reduce_scatter", "all_reduce", "broadcast", "messages" };
    ncclComm_t comm = work->comm;
    if (finish && finish(group_stream)) return INTERNAL;
    pthread_mutex_lock(&lock);
    work->sequence = comm->issued++;
    comm->running++;
    comm->polls = POLLS;
    work->without_stream = !enqueue;
    if (work->without_stream) comm->launching++;
    note("rank %d comm %u %s", comm->world_rank, (unsigned)comm->id, names[work->kind]);
    if (work->kind == BROADCAST) note(" from %d", work->segment[0].root);
    if (work->segment[0].reduction == AVERAGE) note(" average");
    for (int at = 0; at < work->segments; at++) note(" %zux%d", work->segment[at].count, work->segment[at].dtype);
    note("\n");
    int without_stream = work->without_stream;
    pthread_mutex_unlock(&lock);
    if (without_stream) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, run_alone, work)) return INTERNAL;
        pthread_detach(thread);
    } else if (enqueue(group_stream, run, work)) {
        return INTERNAL;
    }
    return IN_PROGRESS;
}

static int collective_call(int kind, const void *from, void *to, size_t count, int dtype, int root, int reduction,
                           ncclComm_t comm, void *stream) {
    pthread_mutex_lock(&lock);
    int error = SUCCESS;
    if (refuse_calls) error = refuse_calls;
    else if (!ready(comm, "a collective")) error = INVALID_ARGUMENT;
    else if (comm->finalized) error = INVALID_USAGE;
    else if (!from || (!to && kind != MESSAGES) || count == 0 || size_of(dtype) == 0) error = INVALID_ARGUMENT;
    else if (root < 0 || root >= comm->size) error = INVALID_ARGUMENT;
    /* NCCL divides integers after adding them, which no caller uses; before 2.29.7, it lost elements when averaging
       over a single rank. */
    else if (reduction != SUM && (reduction != AVERAGE || dtype < 6 || comm->size == 1))
        error = INVALID_ARGUMENT;
    if (error == INVALID_ARGUMENT) note("VIOLATION arguments of a collective\n");
    pthread_mutex_unlock(&lock);
    if (error) {
        if (depth) group_error = error;
        return error;
    }
    if (!depth) {
        note("VIOLATION a collective outside of a group\n");
        return INVALID_USAGE;
    }
    if (!group_work) group_work = calloc(1, sizeof *group_work);
    if (group_work->comm && (group_work->comm != comm || group_stream != stream || group_work->kind != kind))
        return group_error = INVALID_USAGE;
    group_work->comm = comm;
    group_stream = stream;
    group_work->kind = kind;
    int last = group_work->segments;
    if (last == MAX_SEGMENTS) return group_error = INTERNAL;
    size_t begin = last ? group_work->segment[last - 1].at + brought(group_work, last - 1) : 0;
    group_work->segment[last] = (segment){ count, begin, dtype, root, reduction };
    group_work->from[last] = from;
    group_work->to[last] = to;
    group_work->segments++;
    return begin + brought(group_work, last) > DATA_MAX ? (group_error = INTERNAL) : SUCCESS;
}

int ncclAllGather(const void *from, void *to, size_t count, int dtype, ncclComm_t comm, void *stream) {
    return collective_call(ALL_GATHER, from, to, count, dtype, 0, SUM, comm, stream);
}

int ncclReduceScatter(const void *from, void *to, size_t count, int dtype, int op, ncclComm_t comm, void *stream) {
    return collective_call(REDUCE_SCATTER, from, to, count, dtype, 0, op, comm, stream);
}

int ncclAllReduce(const void *from, void *to, size_t count, int dtype, int op, ncclComm_t comm, void *stream) {
    return collective_call(ALL_REDUCE, from, to, count, dtype, 0, op, comm, stream);
}

int ncclBroadcast(const void *from, void *to, size_t count, int dtype, int root, ncclComm_t comm, void *stream) {
    return collective_call(BROADCAST, from, to, count, dtype, root, SUM, comm, stream);
}

int ncclSend(const void *from, size_t count, int dtype, int peer, ncclComm_t comm, void *stream) {
    return collective_call(MESSAGES, from, NULL, count, dtype, peer, SUM, comm, stream);
}

/* Receives as much as was sent to the same rank before: this fake knows exchanges only. */
int ncclRecv(void *to, size_t count, int dtype, int peer, ncclComm_t comm, void *stream) {
    launch *work = group_work;
    if (group_error) return group_error;
    if (work && work->kind == MESSAGES && work->comm == comm && group_stream == stream && to)
        for (int at = 0; at < work->segments; at++) {
            segment *sent = &work->segment[at];
            if (work->to[at] || sent->root != peer || sent->count != count || sent->dtype != dtype) continue;
            work->to[at] = to;
            return SUCCESS;
        }
    pthread_mutex_lock(&lock);
    note("VIOLATION a message is received, and nothing like it was sent\n");
    pthread_mutex_unlock(&lock);
    return group_error = INVALID_ARGUMENT;
}

/* Communicators. */

int ncclGetVersion(int *version) {
    *version = FAKE_VERSION;
    return SUCCESS;
}

int ncclGetUniqueId(ncclUniqueId *id) {
    pthread_mutex_lock(&lock);
    memset(id, 0, sizeof *id);
    uint64_t number = (uint64_t)getpid() << 32 | next_id++;
    memcpy(id, &number, sizeof number);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

static shared *map_new(int file, uint64_t id, int size) {
    if (file >= 0 && ftruncate(file, sizeof(shared))) return NULL;
    int flags = file < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
    shared *all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, flags, file, 0);
    if (all == MAP_FAILED) return NULL;
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&all->lock, &kind);
    all->id = id;
    all->size = size;
    return all;
}

/* Maps the clique of an id, which the first process creates. Its file is linked to its name only once complete. */
static shared *map(uint64_t id, int size) {
    const char *folder = getenv("FAKE_NCCL_DIR");
    if (!folder) return map_new(-1, id, size);
    char name[4096], draft[4096 + 32];
    snprintf(name, sizeof name, "%s/%016llx", folder, (unsigned long long)id);
    snprintf(draft, sizeof draft, "%s.%d", name, (int)getpid());
    int file = open(name, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        file = open(draft, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        shared *made = file < 0 ? NULL : map_new(file, id, size);
        int is_mine = made && !link(draft, name);
        unlink(draft);
        close(file);
        if (is_mine || !made) return made;
        munmap(made, sizeof *made);
        file = open(name, O_RDWR | O_CLOEXEC);
    }
    void *all = mmap(NULL, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return all == MAP_FAILED ? NULL : all;
}

static clique *clique_of(uint64_t id, int size) {
    clique *group = cliques;
    while (group && group->all->id != id) group = group->next;
    if (group) return group;
    shared *all = map(id, size);
    if (!all) return NULL;
    group = calloc(1, sizeof *group);
    group->all = all;
    group->next = cliques;
    return cliques = group;
}

/* Adds a rank to a clique. NULL if the rank has joined before or the size differs. */
static ncclComm_t join(clique *group, int size, int rank, int world_rank) {
    shared *all = group->all;
    hold(all);
    int is_wrong = all->size != size || all->rank_joined[rank];
    if (!is_wrong) {
        all->joined++;
        all->rank_joined[rank] = 1;
    }
    let_go(all);
    if (is_wrong) return NULL;
    ncclComm_t comm = calloc(1, sizeof *comm);
    comm->clique = group;
    comm->id = all->id;
    comm->size = size;
    comm->rank = rank;
    comm->world_rank = world_rank;
    comm->polls = POLLS;
    comm->next = comms;
    comms = comm;
    group->users++;
    return comm;
}

static int valid(const ncclConfig_t *config) {
    return config && config->size >= sizeof *config && config->magic == 0xcafebeef && config->version >= 21800
        && config->blocking == 0;
}

int ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    uint64_t number;
    memcpy(&number, &id, sizeof number);
    if (rank < 0 || rank >= ranks || ranks > MAX_RANKS || !valid(config) || number == 0) return INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    clique *group = clique_of(number, ranks);
    *comm = group ? join(group, ranks, rank, rank) : NULL;
    pthread_mutex_unlock(&lock);
    return *comm ? IN_PROGRESS : INVALID_ARGUMENT;
}

#ifndef WITHOUT_SPLIT
int ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config) {
    pthread_mutex_lock(&lock);
    int result = INVALID_ARGUMENT;
    if (ready(comm, "ncclCommSplit") && valid(config) && color >= 0 && comm->splits < MAX_SPLITS) {
        shared *all = comm->clique->all;
        hold(all);
        split *cut = &all->splits[comm->splits++];
        cut->color[comm->rank] = color;
        cut->key[comm->rank] = key;
        cut->arrived++;
        let_go(all);
        comm->pending_split = (int)comm->splits;
        comm->split_slot = out;
        *out = NULL;
        result = IN_PROGRESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
#endif

/* Creates a rank's communicator of a split that all ranks have entered. */
static void finish_split(ncclComm_t comm) {
    split *cut = &comm->clique->all->splits[comm->pending_split - 1];
    int size = 0, rank = 0, mine = comm->rank;
    for (int other = 0; other < comm->size; other++) {
        if (cut->color[other] != cut->color[mine]) continue;
        if (cut->key[other] < cut->key[mine] || (cut->key[other] == cut->key[mine] && other < mine)) rank++;
        size++;
    }
    /* The same id in all processes, and a different one for every group. */
    uint64_t id = (comm->id * MAX_SPLITS + comm->pending_split) * 1000003 + cut->color[mine] + 1;
    *comm->split_slot = join(clique_of(id, size), size, rank, comm->world_rank);
    comm->pending_split = 0;
}

int ncclCommGetAsyncError(ncclComm_t comm, int *error) {
    pthread_mutex_lock(&lock);
    int result = SUCCESS;
    if (!alive(comm, "ncclCommGetAsyncError")) {
        result = INVALID_ARGUMENT;
    } else if (comm->async_error) {
        *error = comm->async_error;
    } else if (comm->clique->all->joined < comm->size || comm->launching) {
        *error = IN_PROGRESS;
    } else if (comm->polls > 0) {
        comm->polls--;
        *error = IN_PROGRESS;
    } else if (comm->pending_split) {
        *error = IN_PROGRESS;
        if (comm->clique->all->splits[comm->pending_split - 1].arrived == comm->size) finish_split(comm);
    } else {
        *error = comm->finalized && comm->running ? IN_PROGRESS : SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int ncclCommFinalize(ncclComm_t comm) {
    pthread_mutex_lock(&lock);
    int result = INVALID_ARGUMENT;
    if (ready(comm, "ncclCommFinalize") && !comm->finalized) {
        comm->finalized = 1;
        comm->polls = POLLS;
        result = IN_PROGRESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int ncclCommDestroy(ncclComm_t comm) {
    pthread_mutex_lock(&lock);
    int result = INVALID_ARGUMENT;
    if (ready(comm, "ncclCommDestroy")) {
        if (!comm->finalized || comm->running) note("VIOLATION ncclCommDestroy before everything has ended\n");
        comm->dead = 1;
        note("rank %d comm %u destroyed\n", comm->world_rank, (unsigned)comm->id);
        release(comm);
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int ncclCommAbort(ncclComm_t comm) {
    pthread_mutex_lock(&lock);
    int result = INVALID_ARGUMENT;
    /* Outside of a group, NCCL frees it at once, which waits for other communicators that were not yet aborted. */
    if (depth == 0) note("VIOLATION ncclCommAbort outside of a group\n");
    if (alive(comm, "ncclCommAbort")) {
        comm->dead = comm->aborted = 1;
        note("rank %d comm %u aborted\n", comm->world_rank, (unsigned)comm->id);
        release(comm);
        pthread_cond_broadcast(&changed);
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static int query(ncclComm_t comm, int *out, int value_of) {
    pthread_mutex_lock(&lock);
    int result = ready(comm, "a query") ? SUCCESS : INVALID_ARGUMENT;
    if (result == SUCCESS) *out = value_of == 0 ? comm->size : value_of == 1 ? comm->rank : comm->world_rank;
    pthread_mutex_unlock(&lock);
    return result;
}

int ncclCommCount(ncclComm_t comm, int *out) { return query(comm, out, 0); }
int ncclCommUserRank(ncclComm_t comm, int *out) { return query(comm, out, 1); }
int ncclCommCuDevice(ncclComm_t comm, int *out) { return query(comm, out, 2); }

const char *ncclGetErrorString(int code) {
    switch (code) {
    case 2: return "unhandled system error";
    case 4: return "invalid argument";
    case 5: return "invalid usage";
    case 6: return "remote process exited or there was a network error";
    default: return "unknown result code";
    }
}

const char *ncclGetLastError(ncclComm_t comm) { return comm && comm->async_error ? "socket closed by peer" : ""; }
