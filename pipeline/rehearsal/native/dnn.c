/* cuDNN by its graphs, of which fused attention is one. Any graph is accepted, has one engine without knobs and needs no workspace (that of
 * the real engines is not known here). Whether cuDNN takes an attention is decided by PyTorch's own checks before. */
typedef struct { int type; const char *graph; } Descriptor;
enum { FIND_RESULTS = 202, CONFIGURATION_ENGINE = 300, CONFIGURATION_KNOBS = 302, CONFIGURATION_WORKSPACE = 303, CONFIGURATION_SHARED = 304, PLAN_WORKSPACE = 402, GRAPH_OPERATIONS = 801, GRAPH_ENGINES = 802, ENGINE_INDEX = 1301,
       ENGINE_KNOBS = 1302, ENGINE_NUMERICS = 1303, ENGINE_LAYOUTS = 1304, ENGINE_BEHAVIOR = 1305, TYPE_DESCRIPTOR = 15 };
enum { OPERATION_MATMUL = 19, OPERATION_SDPA_FORWARD = 41, OPERATION_SDPA_BACKWARD = 43 };
int cudnnCreate(Handle **handle) { COUNT("cudnnCreate"); return (*handle = calloc(1, sizeof(Handle))) ? 0 : 4003; }
int cudnnDestroy(Handle *handle) { COUNT("cudnnDestroy"); free(handle); return 0; }
int cudnnSetStream(Handle *handle, uint64_t stream) { COUNT("cudnnSetStream"); return handle->stream = stream, 0; }
int cudnnGetStream(Handle *handle, uint64_t *stream) { COUNT("cudnnGetStream"); return *stream = handle->stream, 0; }
int cudnnBackendCreateDescriptor(int type, Descriptor **descriptor) {
    COUNT("cudnnBackendCreateDescriptor");
    if (!(*descriptor = calloc(1, sizeof(Descriptor)))) return 4003;
    return (*descriptor)->type = type, 0;
}
int cudnnBackendDestroyDescriptor(Descriptor *descriptor) { COUNT("cudnnBackendDestroyDescriptor"); free(descriptor); return 0; }
NOTHING(cudnnBackendFinalize)

/* Attention is two products forward, and five backward, unless it is one operation. */
static const char *graph_name(Descriptor *const *operations, int64_t n) {
    int products = 0, forward = 0, backward = 0;
    for (int64_t i = 0; i < n; i++) {
        products += operations[i]->type == OPERATION_MATMUL;
        forward += operations[i]->type == OPERATION_SDPA_FORWARD;
        backward += operations[i]->type == OPERATION_SDPA_BACKWARD;
    }
    if (forward || products == 2) return "cudnn_attention_forward";
    if (backward || products == 5) return "cudnn_attention_backward";
    return "cudnn_graph";
}
int cudnnBackendSetAttribute(Descriptor *descriptor, int name, int type, int64_t n, const void *values) {
    COUNT("cudnnBackendSetAttribute");
    if (type != TYPE_DESCRIPTOR || n < 1 || !values) return 0;
    Descriptor *const *parts = values;
    if (name == GRAPH_OPERATIONS) descriptor->graph = graph_name(parts, n);
    else if (parts[0] && parts[0]->graph) descriptor->graph = parts[0]->graph; /* engine of a graph, plan of an engine */
    return 0;
}
int cudnnBackendGetAttribute(const Descriptor *descriptor, int name, int type, int64_t wanted, int64_t *n, void *values) {
    COUNT("cudnnBackendGetAttribute");
    (void)type;
    int64_t ignored;
    if (!n) n = &ignored;
    switch (name) {
    case FIND_RESULTS: case CONFIGURATION_ENGINE:
        *n = 1;
        if (values && wanted > 0) ((Descriptor **)values)[0]->graph = descriptor->graph;
        return 0;
    case PLAN_WORKSPACE: case CONFIGURATION_WORKSPACE: case ENGINE_INDEX: return *n = 1, *(int64_t *)values = 0, 0;
    case GRAPH_ENGINES: return *n = 1, *(int64_t *)values = 1, 0;
    case CONFIGURATION_KNOBS: case ENGINE_KNOBS: case ENGINE_NUMERICS: case ENGINE_LAYOUTS: case ENGINE_BEHAVIOR: return *n = 0, 0;
    case CONFIGURATION_SHARED: return *n = 1, *(int *)values = 0, 0;
    default: fprintf(stderr, "cuDNN: attribute %d of a descriptor %d.\n", name, descriptor->type); return unknown(&call, 3000);
    }
}
int cudnnBackendExecute(Handle *handle, const Descriptor *plan, const Descriptor *pack) {
    COUNT("cudnnBackendExecute");
    (void)pack;
    RECORD(GRAPH, (void *)handle->stream, .object = (uint64_t)(plan->graph ? plan->graph : "cudnn_graph"));
    return 0;
}
