/* NCCL: a communicator knows its size and rank, collectives are recorded and move nothing. */
typedef struct { char bytes[128]; } UniqueId;
typedef struct { int size, rank; } Communicator;
static const unsigned char ELEMENT_BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* by ncclDataType_t */

int ncclGetUniqueId(UniqueId *id) { COUNT("ncclGetUniqueId"); memset(id, 0, sizeof *id); return 0; }
static int initialize(Communicator **communicator, int size, int rank) {
    if (!(*communicator = malloc(sizeof(Communicator)))) return 2;
    return **communicator = (Communicator){size, rank}, 0;
}
int ncclCommInitRank(Communicator **c, int size, UniqueId id, int rank) { COUNT("ncclCommInitRank"); (void)id; return initialize(c, size, rank); }
int ncclCommInitRankConfig(Communicator **c, int size, UniqueId id, int rank, const void *config) {
    COUNT("ncclCommInitRankConfig");
    (void)id, (void)config;
    return initialize(c, size, rank);
}
int ncclCommCount(const Communicator *c, int *size) { COUNT("ncclCommCount"); return *size = c->size, 0; }
int ncclCommUserRank(const Communicator *c, int *rank) { COUNT("ncclCommUserRank"); return *rank = c->rank, 0; }
int ncclCommGetAsyncError(const Communicator *c, int *code) { COUNT("ncclCommGetAsyncError"); (void)c; return *code = 0, 0; }
int ncclCommRegister(const Communicator *c, void *p, size_t bytes, void **handle) {
    COUNT("ncclCommRegister");
    (void)c, (void)bytes;
    return *handle = p, 0;
}
/* Communicators are kept: a watchdog may still ask them. */
NOTHING(ncclCommDestroy)
NOTHING(ncclCommAbort)
NOTHING(ncclCommFinalize)
NOTHING(ncclCommDeregister)
NOTHING(ncclGroupStart)
NOTHING(ncclGroupEnd)

static int collective(Call *call, const void *from, void *to, size_t n, int type, int peer, const Communicator *c, void *stream) {
    if (type < 0 || type >= (int)sizeof ELEMENT_BYTES) return 4;
    Entry entry = {.object = (uint64_t)to, .source = (uint64_t)from, .size = n * ELEMENT_BYTES[type], .x = c->size, .y = peer, .z = c->rank};
    append(call, COLLECTIVE, stream, entry);
    return 0;
}
#define P const void *from, void *to, size_t n, int type
#define C const Communicator *c, void *stream
int ncclAllReduce(P, int op, C) { COUNT("ncclAllReduce"); (void)op; return collective(&call, from, to, n, type, 0, c, stream); }
int ncclReduceScatter(P, int op, C) { COUNT("ncclReduceScatter"); (void)op; return collective(&call, from, to, n, type, 0, c, stream); }
int ncclAllGather(P, C) { COUNT("ncclAllGather"); return collective(&call, from, to, n, type, 0, c, stream); }
int ncclAlltoAll(P, C) { COUNT("ncclAlltoAll"); return collective(&call, from, to, n, type, 0, c, stream); }
int ncclBroadcast(P, int root, C) { COUNT("ncclBroadcast"); return collective(&call, from, to, n, type, root, c, stream); }
int ncclReduce(P, int op, int root, C) { COUNT("ncclReduce"); (void)op; return collective(&call, from, to, n, type, root, c, stream); }
int ncclBcast(void *p, size_t n, int type, int root, C) { COUNT("ncclBcast"); return collective(&call, p, p, n, type, root, c, stream); }
int ncclSend(const void *from, size_t n, int type, int peer, C) { COUNT("ncclSend"); return collective(&call, from, NULL, n, type, peer, c, stream); }
int ncclRecv(void *to, size_t n, int type, int peer, C) { COUNT("ncclRecv"); return collective(&call, NULL, to, n, type, peer, c, stream); }
#undef P
#undef C
