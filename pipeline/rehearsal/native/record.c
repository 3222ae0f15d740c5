/* Counts of calls, the record of what was queued, and the functions that Python calls. */
static pthread_mutex_t record_lock = PTHREAD_MUTEX_INITIALIZER;
static Entry *entries;
static long capacity, first, held, appended, lost, most = 1 << 22;
static int recording;
static void (*on_host_wait)(long index);
static const char *last_kernel = "";
/* Stream (or DEVICE) for which this thread waited, while it queued nothing since: waiting again is no wait. */
static __thread uint64_t waited_for = NO_STREAM;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000l + t.tv_nsec;
}

static void grow(void) {
    long larger = capacity ? 2 * capacity : 4096;
    Entry *moved = larger <= most ? malloc(larger * sizeof(Entry)) : NULL;
    if (!moved) return;
    for (long i = 0; i < held; i++) moved[i] = entries[(first + i) % capacity];
    free(entries);
    entries = moved, capacity = larger, first = 0;
}

static void append(Call *call, int kind, void *stream, Entry entry) {
    if (kind == KERNEL) last_kernel = (const char *)entry.object;
    if (kind < EVENT_RECORD || kind == COLLECTIVE || kind == GRAPH) waited_for = NO_STREAM;
    if (!__atomic_load_n(&recording, __ATOMIC_RELAXED)) return;
    static __thread uint32_t thread;
    if (!thread) thread = syscall(SYS_gettid);
    entry.time = now(), entry.stream = (uint64_t)stream, entry.thread = thread;
    entry.call = call - __start_rehearsal_calls, entry.kind = kind;
    pthread_mutex_lock(&record_lock);
    if (held == capacity) grow();
    if (held == capacity && capacity) first = (first + 1) % capacity, held--, lost++;
    if (capacity) entries[(first + held++) % capacity] = entry;
    else lost++;
    long index = appended++;
    pthread_mutex_unlock(&record_lock);
    void (*told)(long) = on_host_wait;
    if (kind == HOST_WAIT && told && !entry.x) told(index); /* without a lock of this library: it runs Python */
}

/* Whether PyTorch's caching allocator waits. It holds a lock then, for which a thread with Python's lock may wait: Python is not called. */
static int by_allocator(void *caller) {
    Dl_info info;
    if (!dladdr(caller, &info) || !info.dli_fname || !strstr(info.dli_fname, "libc10_cuda")) return 0;
    return !info.dli_sname || !strstr(info.dli_sname, "synchronize");
}
static void host_wait(Call *call, void *stream, Event *event, void *caller) {
    if (!event && (waited_for == DEVICE || waited_for == (uint64_t)stream)) return;
    append(call, HOST_WAIT, stream, (Entry){.object = (uint64_t)event, .x = by_allocator(caller)});
    if (!event) waited_for = (uint64_t)stream;
}
#define HOST_WAITS(stream, event) host_wait(&call, stream, event, __builtin_return_address(0))

static int unknown(Call *call, int code) {
    if (!__atomic_exchange_n(&call->unknown, 1, __ATOMIC_RELAXED))
        fprintf(stderr, "The driver without a GPU has no answer for %s: the call fails with code %d.\n", call->name, code);
    return code;
}

/* The functions that Python calls: see pipeline/rehearsal/device_record.py. */
void rehearsal_record(int on, long limit) {
    pthread_mutex_lock(&record_lock);
    recording = on;
    if (limit > 0) most = limit;
    pthread_mutex_unlock(&record_lock);
}
void rehearsal_on_host_wait(void (*function)(long)) { on_host_wait = function; }
long rehearsal_held(void) { return held; }
long rehearsal_lost(void) { return lost; }
/* Moves the oldest `count` entries to `target`; returns how many there were. */
long rehearsal_take(Entry *target, long count) {
    pthread_mutex_lock(&record_lock);
    count = count < held ? count : held;
    for (long i = 0; i < count; i++) target[i] = entries[(first + i) % capacity];
    if (capacity) first = (first + count) % capacity;
    held -= count;
    pthread_mutex_unlock(&record_lock);
    return count;
}
long rehearsal_call_number(void) { return __stop_rehearsal_calls - __start_rehearsal_calls; }
const char *rehearsal_call_name(long index) { return __start_rehearsal_calls[index].name; }
long rehearsal_call_count(long index) { return __start_rehearsal_calls[index].count; }
int rehearsal_call_unknown(long index) { return __start_rehearsal_calls[index].unknown; }
void rehearsal_reset_counts(void) {
    for (Call *call = __start_rehearsal_calls; call < __stop_rehearsal_calls; call++) __atomic_store_n(&call->count, 0, __ATOMIC_RELAXED);
}
