/* Kernels: those that are linked into libraries, known by their host function, and those of loaded modules. */
static pthread_mutex_t functions_lock = PTHREAD_MUTEX_INITIALIZER;
typedef struct { uint64_t key; Function *function; } Place;
static Place *places;
static long place_count, place_capacity;
static Function nameless = {"a kernel without a name", 64, 0, 0, 0};

static Place *place(Place *table, long size, uint64_t key) {
    uint64_t i = (key * 0x9E3779B97F4A7C15ul) >> 20;
    while (table[i % size].key && table[i % size].key != key) i++;
    return &table[i % size];
}
static Function *register_function(const void *host, const char *name) {
    pthread_mutex_lock(&functions_lock);
    if (2 * (place_count + 2) > place_capacity) {
        long larger = place_capacity ? 2 * place_capacity : 1 << 16;
        Place *moved = calloc(larger, sizeof(Place));
        for (long i = 0; moved && i < place_capacity; i++)
            if (places[i].key) *place(moved, larger, places[i].key) = places[i];
        if (!moved) abort();
        free(places);
        places = moved, place_capacity = larger;
    }
    Function *function = calloc(1, sizeof(Function));
    if (!function) abort();
    *function = nameless, function->name = name;
    *place(places, place_capacity, (uint64_t)function) = (Place){(uint64_t)function, function};
    if (host) *place(places, place_capacity, (uint64_t)host) = (Place){(uint64_t)host, function};
    place_count += 2;
    pthread_mutex_unlock(&functions_lock);
    return function;
}
/* Of a host function, or of a handle that this library gave. */
static Function *function_of(const void *p) {
    pthread_mutex_lock(&functions_lock);
    Function *found = place_capacity ? place(places, place_capacity, (uint64_t)p)->function : NULL;
    pthread_mutex_unlock(&functions_lock);
    return found ? found : &nameless;
}
void **__cudaRegisterFatBinary(void *binary) { COUNT("__cudaRegisterFatBinary"); (void)binary; static void *handle; return &handle; }
NOTHING(__cudaRegisterFatBinaryEnd)
NOTHING(__cudaUnregisterFatBinary)
NOTHING(__cudaRegisterVar)
int __cudaInitModule(void **handle) { COUNT("__cudaInitModule"); (void)handle; return 1; }
void __cudaRegisterFunction(void **handle, const char *host, char *device_function, const char *name) {
    COUNT("__cudaRegisterFunction");
    (void)handle, (void)device_function;
    register_function(host, name);
}
int __cudaGetKernel(void **kernel, const void *host) { COUNT("__cudaGetKernel"); return *kernel = function_of(host), 0; }
int cudaGetFuncBySymbol(void **function, const void *host) { COUNT("cudaGetFuncBySymbol"); return *function = function_of(host), 0; }
int cudaGetSymbolAddress(void **p, const void *symbol) {
    COUNT("cudaGetSymbolAddress");
    (void)symbol;
    return (*p = (void *)take(PAGE, 0, PAGE)) ? 0 : runtime_error(OUT_OF_MEMORY);
}
int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes) {
    COUNT("cudaMemcpyToSymbol");
    RECORD(COPY, NULL, .object = (uint64_t)symbol, .source = (uint64_t)from, .size = bytes, .x = 1, .y = 1);
    return 0;
}

static int launch(Call *call, const Function *function, Dim3 grid, Dim3 block, void *stream) {
    Entry entry = {.object = (uint64_t)function->name, .x = grid.x, .y = grid.y, .z = grid.z, .w = block.x * block.y * block.z};
    append(call, KERNEL, stream, entry);
    return 0;
}
/* The configuration between <<< and the call of the kernel. */
static __thread struct { Dim3 grid, block; size_t shared; void *stream; } configuration;
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
    COUNT("__cudaPushCallConfiguration");
    configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream;
    return 0;
}
int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void **stream) {
    COUNT("__cudaPopCallConfiguration");
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared, *stream = configuration.stream;
    return 0;
}
#define LAUNCH(name) \
    int name(const void *function, Dim3 grid, Dim3 block, void **arguments, size_t shared, void *stream) { \
        COUNT(#name); \
        (void)arguments, (void)shared; \
        return launch(&call, function_of(function), grid, block, stream); \
    }
LAUNCH(cudaLaunchKernel)
LAUNCH(__cudaLaunchKernel)
LAUNCH(cudaLaunchCooperativeKernel)
typedef struct { Dim3 grid, block; size_t shared; void *stream; } LaunchConfiguration;
int cudaLaunchKernelExC(const LaunchConfiguration *c, const void *function) {
    COUNT("cudaLaunchKernelExC");
    return launch(&call, function_of(function), c->grid, c->block, c->stream);
}

typedef struct { size_t shared, constants, local; int threads, registers, ptx, binary, cache, max_shared, carveout, cluster[16]; } FunctionAttributes;
int cudaFuncGetAttributes(FunctionAttributes *a, const void *host) {
    COUNT("cudaFuncGetAttributes");
    memset(a, 0, offsetof(FunctionAttributes, cluster));
    a->threads = 1024, a->registers = function_of(host)->registers, a->ptx = a->binary = 10 * MAJOR + MINOR, a->max_shared = SHARED_BYTES - 1024;
    return 0;
}
NOTHING(cudaFuncSetAttribute)
NOTHING(cudaKernelSetAttributeForDevice)
static int resident(int threads, size_t shared) {
    int by_threads = THREADS / (threads > 0 ? threads : 1), by_shared = SHARED_BYTES / (shared + 1024);
    int n = by_threads < by_shared ? by_threads : by_shared;
    return n > 32 ? 32 : n;
}
#define OCCUPANCY(name) \
    int name(int *n, const void *function, int threads, size_t shared) { \
        COUNT(#name); \
        (void)function; \
        return *n = resident(threads, shared), 0; \
    }
OCCUPANCY(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
OCCUPANCY(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
OCCUPANCY(cuOccupancyMaxActiveBlocksPerMultiprocessor)
