/* Device memory: address space that is counted, up to the memory of the GPU. */
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
typedef struct { uint64_t begin, size, counted; } Block;
/* In the order of their addresses, which are never handed out twice. */
static Block *blocks;
static long block_count, block_capacity;
static uint64_t next_address = DEVICE_BEGIN, used_bytes;
static int64_t outside_bytes;

static uint64_t pages(uint64_t bytes) { return (bytes + PAGE - 1) & ~(PAGE - 1); }

static uint64_t available(void) {
    int64_t left = (int64_t)MEMORY_BYTES - (int64_t)used_bytes - outside_bytes;
    return left > 0 ? left : 0;
}

/* Returns an address, or 0 if the GPU has less memory than `counted` left. */
static uint64_t take(uint64_t bytes, uint64_t counted, uint64_t alignment) {
    uint64_t address = 0;
    pthread_mutex_lock(&memory_lock);
    if (alignment < PAGE) alignment = PAGE;
    uint64_t begin = (next_address + alignment - 1) & ~(alignment - 1);
    if (block_count == block_capacity) {
        long larger = block_capacity ? 2 * block_capacity : 1024;
        Block *moved = realloc(blocks, larger * sizeof(Block));
        if (moved) blocks = moved, block_capacity = larger;
    }
    if (counted <= available() && pages(bytes) < DEVICE_END - begin && block_count < block_capacity) {
        blocks[block_count++] = (Block){begin, bytes, counted};
        next_address = begin + pages(bytes) + PAGE, used_bytes += counted, address = begin;
    }
    pthread_mutex_unlock(&memory_lock);
    return address;
}

static Block *block_at(uint64_t address) {
    long low = 0, high = block_count;
    while (low < high) {
        long middle = (low + high) / 2;
        if (blocks[middle].begin <= address) low = middle + 1;
        else high = middle;
    }
    return low && address < blocks[low - 1].begin + pages(blocks[low - 1].size) ? &blocks[low - 1] : NULL;
}

/* Returns its bytes, or -1 if nothing is allocated at the address. */
static int64_t release(uint64_t address) {
    pthread_mutex_lock(&memory_lock);
    Block *block = block_at(address);
    int64_t size = block && block->begin == address && block->size ? (int64_t)block->size : -1;
    if (size >= 0) used_bytes -= block->counted, block->size = block->counted = 0;
    pthread_mutex_unlock(&memory_lock);
    return size;
}

static int allocate(Call *call, void **p, size_t bytes, void *stream) {
    if (!bytes) return *p = NULL, 0;
    *p = (void *)take(bytes, pages(bytes), PAGE);
    append(call, ALLOCATE, stream, (Entry){.object = (uint64_t)*p, .size = bytes}); /* an object of 0: it failed */
    return *p ? 0 : runtime_error(OUT_OF_MEMORY);
}
static int deallocate(Call *call, void *p, void *stream) {
    if (!p) return 0;
    int64_t size = release((uint64_t)p);
    if (size < 0) return runtime_error(INVALID_VALUE);
    forget((uint64_t)p, size);
    append(call, RELEASE, stream, (Entry){.object = (uint64_t)p, .size = size});
    return 0;
}
int cudaMalloc(void **p, size_t bytes) { COUNT("cudaMalloc"); return allocate(&call, p, bytes, NULL); }
int cudaFree(void *p) { COUNT("cudaFree"); return deallocate(&call, p, NULL); }
int cudaMallocAsync(void **p, size_t bytes, void *stream) { COUNT("cudaMallocAsync"); return allocate(&call, p, bytes, stream); }
int cudaFreeAsync(void *p, void *stream) { COUNT("cudaFreeAsync"); return deallocate(&call, p, stream); }
int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    COUNT("cudaMemGetInfo");
    pthread_mutex_lock(&memory_lock);
    *free_bytes = available(), *total = MEMORY_BYTES;
    pthread_mutex_unlock(&memory_lock);
    return 0;
}

/* Virtual memory, as expandable segments use it: an address range costs nothing, a handle costs its bytes. */
int cuMemAddressReserve(uint64_t *p, size_t bytes, size_t alignment, uint64_t wanted, unsigned long long flags) {
    COUNT("cuMemAddressReserve");
    (void)wanted, (void)flags;
    return (*p = take(bytes, 0, alignment)) ? 0 : OUT_OF_MEMORY;
}
int cuMemAddressFree(uint64_t p, size_t bytes) { COUNT("cuMemAddressFree"); (void)bytes; return release(p) < 0 ? INVALID_VALUE : 0; }
int cuMemCreate(uint64_t *handle, size_t bytes, const void *properties, unsigned long long flags) {
    COUNT("cuMemCreate");
    (void)properties, (void)flags;
    *handle = take(bytes, pages(bytes), PAGE);
    RECORD(ALLOCATE, NULL, .object = *handle, .size = bytes);
    return *handle ? 0 : OUT_OF_MEMORY;
}
int cuMemRelease(uint64_t handle) {
    COUNT("cuMemRelease");
    int64_t size = release(handle);
    if (size >= 0) RECORD(RELEASE, NULL, .object = handle, .size = size);
    return size < 0 ? INVALID_VALUE : 0;
}
int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int kind) {
    COUNT("cuMemGetAllocationGranularity");
    (void)properties, (void)kind;
    return *bytes = PAGE, 0;
}
int cuMemUnmap(uint64_t p, size_t bytes) { COUNT("cuMemUnmap"); forget(p, bytes); return 0; }
NOTHING(cuMemMap)
NOTHING(cuMemSetAccess)
int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t p) {
    COUNT("cuMemGetAddressRange_v2");
    pthread_mutex_lock(&memory_lock);
    Block *block = block_at(p);
    if (block && base) *base = block->begin;
    if (block && bytes) *bytes = block->size;
    pthread_mutex_unlock(&memory_lock);
    return block ? 0 : INVALID_VALUE;
}

/* Memory outside of PyTorch's: the CUDA context, NCCL's buffers, other processes. Less than none gives the GPU more memory. */
void rehearsal_hold(int64_t bytes) { outside_bytes = bytes; }
uint64_t rehearsal_used(void) { return used_bytes; }
