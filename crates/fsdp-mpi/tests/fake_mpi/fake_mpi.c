/* An MPI whose ranks are threads of one process, with the handles and constants of any of the three families.
 *
 * A rank is a thread that called MPI_Init_thread; `fake_begin` sets the number of ranks. Messages move only while the
 * receiver is inside a call, a random number of bytes at a time. Long messages move straight from the sender's memory,
 * so memory that is released too early shows as wrong bytes. MPI_Test of a finished operation sometimes reports "not
 * yet".
 * A violation of MPI's rules prints a message and aborts the process.
 *
 * Build with -DFAMILY_OPEN_MPI, -DFAMILY_MPICH or -DFAMILY_STANDARD. */

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(FAMILY_MPICH)
typedef int Handle;
#define WORLD 0x44000000
#define BYTE 0x4c00010d
#define ERRORS_RETURN 0x54000001
#define REQUEST_NULL 0x2c000000
#define FUNNELED 1
#define STATUS_BYTES 20
#ifndef VERSION
#define VERSION "MPICH Version:\t4.0.2\nMPICH Release date: today"
#endif
#elif defined(FAMILY_OPEN_MPI)
typedef void *Handle;
char ompi_mpi_comm_world[16], ompi_mpi_byte[16], ompi_mpi_errors_return[16], ompi_request_null[16];
#define WORLD ((Handle)ompi_mpi_comm_world)
#define BYTE ((Handle)ompi_mpi_byte)
#define ERRORS_RETURN ((Handle)ompi_mpi_errors_return)
#define REQUEST_NULL ((Handle)ompi_request_null)
#define FUNNELED 1
#define STATUS_BYTES 24
#define VERSION "Open MPI v4.1.4, package: fake"
#else
typedef void *Handle;
#define WORLD ((Handle)0x101)
#define BYTE ((Handle)0x247)
#define ERRORS_RETURN ((Handle)0x143)
#define REQUEST_NULL ((Handle)0x180)
#define FUNNELED 1024
#define STATUS_BYTES 32
#define VERSION "a library with the standard ABI"
int MPI_Abi_get_version(int *major, int *minor) { return *major = 1, *minor = 0; }
#endif
#ifndef PROVIDED
#define PROVIDED FUNNELED
#endif

#define EAGER_MAX 4096
#define FIRST_REQUEST 0x500000
#define FIRST_TYPE 0x300000
#define ERR_TRUNCATE 15

/* A type of several blocks as made by MPI_Type_create_hindexed, or one block of bytes. */
typedef struct {
    int blocks, committed, freed;
    int *lens;
    intptr_t *starts;
} Type;

typedef struct Request {
    int is_send, rank, peer, tag, done, code, cancelled;
    Type data;
    int len, moved;
    struct Request *with; /* the matching request of the peer, once matched */
    struct Request *next;
} Request;

typedef struct {
    int size, come, finalized, held, deaf, moving, empty;
    int fail_call, fail_message; /* rank + 1 whose next send or next long receive fails; 0 for none */
    uint64_t random;
    Request *first, *last;
} Universe;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Universe *next_universe;
static Request **table;
static size_t requests;
static Type types[1 << 16];
static size_t made;
static __thread Universe *mine;
static __thread int my_rank, handler_set, ended, live;

static void broken(const char *format, ...) {
    va_list list;
    va_start(list, format);
    fprintf(stderr, "a rule of MPI was broken: ");
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    abort();
}

static void enter(const char *call) {
    if (!mine || ended) broken("%s by a thread on which MPI is not initialized", call);
    pthread_mutex_lock(&lock);
}

static uint64_t chance(uint64_t below) {
    mine->random ^= mine->random << 13, mine->random ^= mine->random >> 7, mine->random ^= mine->random << 17;
    return mine->random % below;
}

static Type one_block(const void *start, int len) {
    Type type = {.blocks = 1, .lens = malloc(sizeof(int)), .starts = malloc(sizeof(intptr_t))};
    type.lens[0] = len, type.starts[0] = (intptr_t)start;
    return type;
}

static void free_blocks(Type type) { free(type.lens), free(type.starts); }

/* Returns the address of a byte of a message; `left` is the number of bytes from there to the end of its block. */
static char *at(const Type *type, int place, int *left) {
    for (int block = 0; block < type->blocks; block++) {
        if (place < type->lens[block]) return *left = type->lens[block] - place, (char *)type->starts[block] + place;
        place -= type->lens[block];
    }
    return *left = 0, NULL;
}

static void copy(const Type *to, const Type *from, int place, int len) {
    while (len > 0) {
        int left_to, left_from;
        char *target = at(to, place, &left_to);
        const char *source = at(from, place, &left_from);
        int now = left_to < left_from ? left_to : left_from;
        if (now > len) now = len;
        if (now == 0) broken("a message is longer than its blocks");
        memcpy(target, source, now);
        place += now, len -= now;
    }
}

static void done(Request *request, int code) { request->done = 1, request->code = code; }

/* Matches messages with receives of the same ranks and tag, both in the order in which they were posted. */
static void meet(void) {
    for (Request *receive = mine->first; receive; receive = receive->next) {
        if (receive->is_send || receive->rank != my_rank || receive->with || receive->done) continue;
        for (Request *send = mine->first; send; send = send->next) {
            if (!send->is_send || send->peer != my_rank || send->rank != receive->peer || send->tag != receive->tag ||
                send->with)
                continue;
            receive->with = send, send->with = receive;
            if (send->len > receive->len) done(receive, ERR_TRUNCATE), done(send, 0);
            break;
        }
    }
}

/* Removes requests that are done from the list; a send stays until its receive is done. */
static void forget(void) {
    Request **place = &mine->first;
    mine->last = NULL;
    while (*place) {
        Request *request = *place;
        int is_over = request->done && (!request->is_send || (request->with && request->with->done));
        if (is_over) *place = request->next;
        else mine->last = request, place = &request->next;
    }
}

static void move(void) {
    meet();
    for (Request *receive = mine->first; receive; receive = receive->next) {
        Request *send = receive->with;
        if (receive->is_send || receive->rank != my_rank || !send || receive->done) continue;
        if (send->len == 0 && mine->deaf) continue;
        int is_long = send->len > EAGER_MAX, left = send->len - send->moved;
        if (is_long && send->moved > 0 && mine->held) continue;
        int most = is_long ? 1 + (int)chance(send->len > 1 << 20 ? 32 << 20 : 32 << 10) : left;
        int now = left < most ? left : most;
        if (is_long && mine->held && now == left) now = left / 2;
        copy(&receive->data, &send->data, send->moved, now);
        if (is_long && send->moved == 0) mine->moving++;
        send->moved += now;
        if (send->moved < send->len) continue;
        int fails = is_long && mine->fail_message == my_rank + 1;
        if (fails) mine->fail_message = 0;
        done(receive, fails ? 77 : 0);
        if (is_long) mine->moving--, done(send, 0);
        else free((char *)send->data.starts[0]), free_blocks(send->data);
    }
    forget();
}

static Request *of(Handle handle, const char *call) {
    size_t place = (size_t)handle - FIRST_REQUEST;
    if (place >= requests || !table[place]) broken("%s of no request", call);
    if (table[place]->rank != my_rank) broken("%s of another rank's request", call);
    return table[place];
}

static int begin(Request request, const void *start, int count, Handle type, Handle world, Handle *handle) {
    if (world != WORLD) broken("wrong handles");
    if (!handler_set) broken("errors are still fatal");
    if (count < 0) broken("a negative count");
    if (request.peer < 0 || request.peer >= mine->size || request.peer == my_rank) broken("rank %d", request.peer);
    if (request.tag < 0 || request.tag > 32767) broken("tag %d", request.tag);
    if (type == BYTE) {
        request.data = one_block(start, count);
    } else {
        size_t place = (size_t)type - FIRST_TYPE;
        if (place >= made || !types[place].committed || types[place].freed || start || count != 1) broken("wrong type");
        request.data = types[place];
    }
    for (int block = 0; block < request.data.blocks; block++) request.len += request.data.lens[block];
    if (request.is_send && mine->fail_call == my_rank + 1) {
        mine->fail_call = 0;
        pthread_mutex_unlock(&lock);
        return 66;
    }
    if (request.is_send && request.len == 0) mine->empty++;
    Request *new = malloc(sizeof *new);
    *new = request;
    if (request.is_send && request.len <= EAGER_MAX) {
        new->data = one_block(malloc(request.len + 1), request.len);
        copy(&new->data, &request.data, 0, request.len);
        done(new, 0);
    }
    if (mine->last) mine->last->next = new;
    else mine->first = new;
    mine->last = new;
    table = realloc(table, (requests + 1) * sizeof *table);
    table[requests] = new;
    *handle = (Handle)(FIRST_REQUEST + requests++);
    live++;
    pthread_mutex_unlock(&lock);
    return 0;
}

int MPI_Isend(const void *start, int count, Handle type, int to, int tag, Handle world, Handle *handle) {
    enter("MPI_Isend");
    Request request = {.is_send = 1, .rank = my_rank, .peer = to, .tag = tag};
    return begin(request, start, count, type, world, handle);
}

int MPI_Irecv(void *start, int count, Handle type, int from, int tag, Handle world, Handle *handle) {
    enter("MPI_Irecv");
    Request request = {.rank = my_rank, .peer = from, .tag = tag};
    return begin(request, start, count, type, world, handle);
}

int MPI_Type_create_hindexed(int blocks, const int *lens, const intptr_t *starts, Handle of, Handle *type) {
    enter("MPI_Type_create_hindexed");
    if (of != BYTE || blocks < 2 || made == sizeof types / sizeof *types) broken("a type of %d blocks", blocks);
    Type *new = &types[made];
    new->blocks = blocks;
    new->lens = memcpy(malloc(blocks * sizeof *lens), lens, blocks * sizeof *lens);
    new->starts = memcpy(malloc(blocks * sizeof *starts), starts, blocks * sizeof *starts);
    *type = (Handle)(FIRST_TYPE + made++);
    pthread_mutex_unlock(&lock);
    return 0;
}

static Type *type_of(Handle type, const char *call) {
    size_t place = (size_t)type - FIRST_TYPE;
    if (place >= made || types[place].freed) broken("%s of no type", call);
    return &types[place];
}

int MPI_Type_commit(Handle *type) {
    enter("MPI_Type_commit");
    type_of(*type, "MPI_Type_commit")->committed = 1;
    pthread_mutex_unlock(&lock);
    return 0;
}

int MPI_Type_free(Handle *type) {
    enter("MPI_Type_free");
    type_of(*type, "MPI_Type_free")->freed = 1;
    pthread_mutex_unlock(&lock);
    return 0;
}

int MPI_Test(Handle *handle, int *flag, void *status) {
    enter("MPI_Test");
    if (*handle == REQUEST_NULL) broken("MPI_Test of a request that has ended");
    move();
    Request *request = of(*handle, "MPI_Test");
    memset(status, 0xee, STATUS_BYTES);
    *flag = request->done && chance(3) > 0;
    int code = *flag ? request->code : 0;
    if (*flag) {
        table[(size_t)*handle - FIRST_REQUEST] = NULL;
        *handle = REQUEST_NULL;
        live--;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int MPI_Cancel(Handle *handle) {
    enter("MPI_Cancel");
    Request *request = of(*handle, "MPI_Cancel");
    if (request->is_send) broken("a send was cancelled");
    if (!request->with && !request->done) request->cancelled = 1, done(request, 0);
    pthread_mutex_unlock(&lock);
    return 0;
}

int MPI_Iprobe(int from, int tag, Handle world, int *flag, void *status) {
    enter("MPI_Iprobe");
    if (world != WORLD || from != my_rank || tag < 0) broken("MPI_Iprobe of %d", from);
    move();
    *flag = 0;
    memset(status, 0xee, STATUS_BYTES);
    pthread_mutex_unlock(&lock);
    return 0;
}

int MPI_Initialized(int *flag) { return *flag = mine != NULL, 0; }

int MPI_Init_thread(int *count, char ***arguments, int required, int *provided) {
    (void)count, (void)arguments;
    if (mine) broken("MPI_Init_thread was called twice");
    if (required != FUNNELED) broken("level %d", required);
    pthread_mutex_lock(&lock);
    static Universe alone = {.size = 1, .random = 1};
    mine = next_universe ? next_universe : &alone;
    if (mine->come == mine->size) broken("more ranks come than were announced");
    my_rank = mine->come++;
    *provided = PROVIDED;
    pthread_mutex_unlock(&lock);
    return 0;
}

int MPI_Comm_rank(Handle world, int *rank) {
    enter("MPI_Comm_rank");
    if (world != WORLD) broken("wrong handles");
    *rank = my_rank;
    pthread_mutex_unlock(&lock);
    return 0;
}

int MPI_Comm_size(Handle world, int *size) {
    enter("MPI_Comm_size");
    if (world != WORLD) broken("wrong handles");
    *size = mine->size;
    pthread_mutex_unlock(&lock);
    return 0;
}

int MPI_Comm_set_errhandler(Handle world, Handle handler) {
    if (world != WORLD || handler != ERRORS_RETURN) broken("wrong handles");
    handler_set = 1;
    return 0;
}

int MPI_Finalize(void) {
    enter("MPI_Finalize");
    if (live) broken("MPI_Finalize with %d requests left", live);
    mine->finalized++;
    ended = 1;
    pthread_mutex_unlock(&lock);
    return 0;
}

int MPI_Error_string(int code, char *text, int *len) { return *len = sprintf(text, "the fake's error %d", code), 0; }

int MPI_Get_library_version(char *text, int *len) { return *len = sprintf(text, "%s", VERSION), 0; }

/* Creates the next world, for the next `size` threads that initialize MPI. */
Universe *fake_begin(int size, uint64_t seed) {
    Universe *universe = calloc(1, sizeof *universe);
    universe->size = size;
    universe->random = seed * 2 + 1;
    pthread_mutex_lock(&lock);
    next_universe = universe;
    pthread_mutex_unlock(&lock);
    return universe;
}

static int set(int *field, int value) {
    pthread_mutex_lock(&lock);
    int before = *field;
    if (value >= 0) *field = value;
    pthread_mutex_unlock(&lock);
    return before;
}

/* Long messages start to move, but do not end until this is set to 0. */
void fake_hold(Universe *universe, int held) { set(&universe->held, held); }
/* Empty messages no longer arrive. */
void fake_deafen(Universe *universe, int deaf) { set(&universe->deaf, deaf); }
/* Number of empty messages sent. */
int fake_empty(Universe *universe) { return set(&universe->empty, -1); }
/* Number of long messages that have started to move and have not ended. */
int fake_moving(Universe *universe) { return set(&universe->moving, -1); }
/* Number of ranks that have called MPI_Finalize. */
int fake_finalized(Universe *universe) { return set(&universe->finalized, -1); }
/* The next send of this rank fails. */
void fake_fail_call(Universe *universe, int rank) { set(&universe->fail_call, rank + 1); }
/* The next long message to this rank fails when it ends. */
void fake_fail_message(Universe *universe, int rank) { set(&universe->fail_message, rank + 1); }
