/* The device, its context, versions and errors. MEMORY_BYTES, DEVICE_NAME, MAJOR ... are the constants of the GPU. */
static __thread int last_error;
static int runtime_error(int code) { return last_error = code; }

static int attribute(int kind) {
    switch (kind) { /* CU_DEVICE_ATTRIBUTE_..., equal to cudaDevAttr... */
    case 1: case 2: case 3: return 1024;
    case 4: return 64;
    case 5: return 2147483647;
    case 6: case 7: return 65535;
    case 8: return 49152;
    case 9: return 65536;
    case 10: return 32;
    case 12: case 82: return 65536;
    case 13: return 1980000; /* kHz, and of the memory at 36: Triton computes peaks of them, Inductor's choices do not depend on it */
    case 36: return 2619000;
    case 14: return 512;
    case 16: return MULTIPROCESSORS;
    case 37: return 5120;
    case 38: return L2_BYTES;
    case 39: return THREADS;
    case 40: return 3;
    case 75: return MAJOR;
    case 76: return MINOR;
    case 81: return SHARED_BYTES;
    case 97: return SHARED_BYTES - 1024;
    case 106: return 32;
    case 111: return 1024;
    case 19: case 31: case 32: case 41: case 78: case 79: case 80: case 83: case 90: case 95: case 99: case 102: case 115: case 125: return 1;
    case 120: case 127: return MAJOR >= 9; /* clusters, tensor maps */
    case 33: return 1; /* bus */
    default: return 0; /* multicast, fabric handles, integrated, stream memory operations: none */
    }
}
int cudaDeviceGetAttribute(int *value, int kind, int device) { COUNT("cudaDeviceGetAttribute"); (void)device; return *value = attribute(kind), 0; }
int cuDeviceGetAttribute(int *value, int kind, int device) { COUNT("cuDeviceGetAttribute"); (void)device; return *value = attribute(kind), 0; }

/* cudaDeviceProp of CUDA 13: what is not named here is zero. */
typedef struct {
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t memory, shared;
    int registers, warp;
    size_t pitch;
    int threads, block[3], grid[3];
    size_t constants;
    int major, minor;
    size_t texture, texture_pitch;
    int multiprocessors, integrated, map_host, textures[39];
    size_t surface;
    int concurrent, ecc, bus, device, domain, tcc, engines, unified, bus_width, l2, persisting_l2, multiprocessor_threads, priorities, l1, local_l1;
    size_t multiprocessor_shared;
    int multiprocessor_registers, managed, multi_gpu, multi_gpu_group, atomics, pageable, concurrent_managed, preemption, host_pointers, cooperative;
    size_t shared_optin;
    int page_tables, managed_access, blocks, window;
    size_t reserved_shared;
    int rest[76];
} Properties;
_Static_assert(sizeof(Properties) == 1008 && offsetof(Properties, l2) == 596 && offsetof(Properties, shared_optin) == 672, "cudaDeviceProp");
int cudaGetDeviceProperties(Properties *p, int device) {
    COUNT("cudaGetDeviceProperties");
    (void)device;
    *p = (Properties){
        .name = DEVICE_NAME, .uuid = "rehearsal", .memory = MEMORY_BYTES, .shared = 49152, .registers = 65536, .warp = 32, .pitch = 2147483647,
        .threads = 1024, .block = {1024, 1024, 64}, .grid = {2147483647, 65535, 65535}, .constants = 65536, .major = MAJOR, .minor = MINOR,
        .texture = 512, .texture_pitch = 32, .multiprocessors = MULTIPROCESSORS, .map_host = 1, .surface = 512, .concurrent = 1, .ecc = 1,
        .bus = 1, .engines = 3, .unified = 1, .bus_width = 5120, .l2 = L2_BYTES, .multiprocessor_threads = THREADS, .priorities = 1, .l1 = 1,
        .local_l1 = 1, .multiprocessor_shared = SHARED_BYTES, .multiprocessor_registers = 65536, .managed = 1, .preemption = 1,
        .cooperative = 1, .shared_optin = SHARED_BYTES - 1024, .blocks = 32, .reserved_shared = 1024,
    };
    return 0;
}

int cudaGetDeviceCount(int *n) { COUNT("cudaGetDeviceCount"); return *n = 1, 0; }
int cuDeviceGetCount(int *n) { COUNT("cuDeviceGetCount"); return *n = 1, 0; }
int cudaGetDevice(int *device) { COUNT("cudaGetDevice"); return *device = 0, 0; }
int cuDeviceGet(int *device, int index) { COUNT("cuDeviceGet"); return *device = index, index ? 101 : 0; }
int cudaSetDevice(int device) { COUNT("cudaSetDevice"); return device ? runtime_error(101) : 0; }
int cudaDriverGetVersion(int *version) { COUNT("cudaDriverGetVersion"); return *version = CUDA_VERSION, 0; }
int cudaRuntimeGetVersion(int *version) { COUNT("cudaRuntimeGetVersion"); return *version = CUDA_VERSION, 0; }
int cuDriverGetVersion(int *version) { COUNT("cuDriverGetVersion"); return *version = CUDA_VERSION, 0; }
int cudaDeviceCanAccessPeer(int *can, int a, int b) { COUNT("cudaDeviceCanAccessPeer"); (void)a, (void)b; return *can = 0, 0; }
int cudaDeviceGetPCIBusId(char *text, int n, int device) { COUNT("cudaDeviceGetPCIBusId"); (void)device; return snprintf(text, n, "0000:01:00.0"), 0; }
int cuDeviceGetName(char *text, int n, int device) { COUNT("cuDeviceGetName"); (void)device; return snprintf(text, n, "%s", DEVICE_NAME), 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { COUNT("cuDeviceTotalMem_v2"); (void)device; return *bytes = MEMORY_BYTES, 0; }
/* Tables of private functions that NVIDIA's libraries look up in the driver at times: there are none, and they go on without. */
int cuGetExportTable(const void **table, const void *id) { COUNT("cuGetExportTable"); (void)id; return *table = 0, NOT_SUPPORTED; }
int cudaGetLastError(void) { COUNT("cudaGetLastError"); int code = last_error; return last_error = 0, code; }
int cudaPeekAtLastError(void) { COUNT("cudaPeekAtLastError"); return last_error; }

static const char *error_text(int code) {
    switch (code) {
    case 0: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case 101: return "invalid device ordinal";
    case SYMBOL_NOT_FOUND: return "named symbol not found";
    case NOT_SUPPORTED: return "operation not supported: the driver without a GPU has no answer for it";
    default: return "error of the driver without a GPU";
    }
}
const char *cudaGetErrorString(int code) { COUNT("cudaGetErrorString"); return error_text(code); }
const char *cudaGetErrorName(int code) { COUNT("cudaGetErrorName"); return error_text(code); }
int cuGetErrorString(int code, const char **text) { COUNT("cuGetErrorString"); return *text = error_text(code), 0; }
int cuGetErrorName(int code, const char **text) { COUNT("cuGetErrorName"); return *text = error_text(code), 0; }

/* There is one context. */
#define CONTEXT ((void *)16)
int cuCtxGetCurrent(void **context) { COUNT("cuCtxGetCurrent"); return *context = CONTEXT, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { COUNT("cuDevicePrimaryCtxRetain"); (void)device; return *context = CONTEXT, 0; }
int cuCtxPopCurrent_v2(void **context) { COUNT("cuCtxPopCurrent_v2"); if (context) *context = CONTEXT; return 0; }
int cuCtxGetDevice(int *device) { COUNT("cuCtxGetDevice"); return *device = 0, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    COUNT("cuDevicePrimaryCtxGetState");
    (void)device;
    return *flags = 0, *active = 1, 0;
}
int cuCtxGetLimit(size_t *value, int kind) { COUNT("cuCtxGetLimit"); (void)kind; return *value = 1 << 20, 0; }
NOTHING(cuInit)
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxPushCurrent_v2)
NOTHING(cuCtxSetLimit)
NOTHING(cuDevicePrimaryCtxRelease_v2)
NOTHING(cudaProfilerStart)
NOTHING(cudaProfilerStop)
NOTHING(cudaThreadExchangeStreamCaptureMode)

/* Functions of the driver that are looked up by name: those of this library. */
static int entry_point(const char *name, void **function, int *result) {
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, versioned);
    if (!*function) *function = dlsym(RTLD_DEFAULT, name);
    if (result) *result = *function ? 0 : 1;
    return *function ? 0 : SYMBOL_NOT_FOUND;
}
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *result) {
    COUNT("cudaGetDriverEntryPointByVersion");
    (void)version, (void)flags;
    return entry_point(name, function, result);
}
int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *result) {
    COUNT("cudaGetDriverEntryPoint");
    (void)flags;
    return entry_point(name, function, result);
}
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *result) {
    COUNT("cuGetProcAddress_v2");
    (void)version, (void)flags;
    return entry_point(name, function, result);
}
