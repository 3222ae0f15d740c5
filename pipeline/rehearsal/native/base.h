/* A library that answers like one GPU: what its parts share. driver_source.py joins the parts in one source, after the constants of the GPU. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Error codes of the CUDA runtime and driver, which agree for these. */
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, SYMBOL_NOT_FOUND = 500, NOT_SUPPORTED = 801 };
/* Addresses of device memory: no process on x86-64 or AArch64 Linux has heap, stack or libraries there. Nothing is mapped. */
#define DEVICE_BEGIN (1ul << 40)
#define DEVICE_END (1ul << 45)
/* Pages of device memory. */
#define PAGE (2ul << 20)

/* The stream of a wait for the whole device, and none. */
#define DEVICE (~0ul)
#define NO_STREAM (~0ul - 1)

/* A function and how often it was called. All of them lie in one section of the library, which is the table of calls. */
typedef struct { const char *name; long count, unknown, padding; } Call;
extern Call __start_rehearsal_calls[], __stop_rehearsal_calls[];
#define COUNT(text) \
    static Call call __attribute__((section("rehearsal_calls"), used, aligned(32))) = {text, 0, 0, 0}; \
    __atomic_fetch_add(&call.count, 1, __ATOMIC_RELAXED)
/* A function without results: it sets what has no effect here, or frees what costs nothing. */
#define NOTHING(name) \
    int name(void) { COUNT(#name); return 0; }
/* A function whose answer is not known: it fails, and its name is told. */
#define UNKNOWN(name, code) \
    int name(void) { COUNT(#name); return unknown(&call, code); }

/* What is recorded; the numbers are those of pipeline/rehearsal/device_record.py. */
enum { KERNEL = 1, PRODUCT, COPY, FILL, EVENT_RECORD, STREAM_WAIT, HOST_WAIT, ALLOCATE, RELEASE, COLLECTIVE, GRAPH, QUERY, TENSOR_ALLOCATE,
       TENSOR_FREE };
typedef struct {
    int64_t time;             /* CLOCK_MONOTONIC, ns */
    uint64_t stream, object;  /* object: name of a kernel (char *), event, or address that is written or allocated */
    uint64_t source, size;    /* source: address that is read; size: bytes, or the data type of a product */
    uint32_t x, y, z, w;      /* kernel: grid and threads of a block; product: m, n, k, batch; copy: direction, whether the host memory is pageable; wait: whether the allocator waits */
    uint32_t thread;
    uint16_t call, kind;      /* call: index in the table of calls */
} Entry;
typedef struct { unsigned x, y, z; } Dim3;
typedef struct { uint64_t stream; int math_mode, pointer_mode; } Handle;
typedef struct { const char *name; int registers, local, shared, max_shared; } Function;
typedef struct { int64_t time; uint64_t stream; } Event;

static int unknown(Call *call, int code);
static void append(Call *call, int kind, void *stream, Entry entry);
static int64_t now(void);
#define RECORD(kind, stream, ...) append(&call, kind, stream, (Entry){__VA_ARGS__})
static int on_device(const void *p) { return (uint64_t)p >= DEVICE_BEGIN && (uint64_t)p < DEVICE_END; }
/* Declarations that parts use before they are defined. */
static int runtime_error(int code);
static void forget(uint64_t begin, uint64_t size);
static void host_wait(Call *call, void *stream, Event *event, void *caller);
