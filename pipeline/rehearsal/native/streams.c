/* Streams and events. Work completes at once; an event has the host's time at which it was recorded. */
static int create_stream(void **stream) {
    static uint64_t next = 64;
    return *stream = (void *)__atomic_add_fetch(&next, 1, __ATOMIC_RELAXED), 0;
}
int cudaStreamCreate(void **stream) { COUNT("cudaStreamCreate"); return create_stream(stream); }
int cudaStreamCreateWithFlags(void **stream) { COUNT("cudaStreamCreateWithFlags"); return create_stream(stream); }
int cudaStreamCreateWithPriority(void **stream) { COUNT("cudaStreamCreateWithPriority"); return create_stream(stream); }
int cuStreamCreate(void **stream) { COUNT("cuStreamCreate"); return create_stream(stream); }
NOTHING(cudaStreamDestroy)
int cudaStreamGetPriority(void *stream, int *priority) { COUNT("cudaStreamGetPriority"); (void)stream; return *priority = 0, 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { COUNT("cudaDeviceGetStreamPriorityRange"); return *least = 0, *greatest = -5, 0; }
int cudaStreamIsCapturing(void *stream, int *status) { COUNT("cudaStreamIsCapturing"); (void)stream; return *status = 0, 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status) { COUNT("cudaStreamGetCaptureInfo"); (void)stream; return *status = 0, 0; }
int cudaStreamQuery(void *stream) { COUNT("cudaStreamQuery"); RECORD(QUERY, stream, 0); return 0; }
int cudaStreamSynchronize(void *stream) { COUNT("cudaStreamSynchronize"); HOST_WAITS(stream, NULL); return 0; }
int cuStreamSynchronize(void *stream) { COUNT("cuStreamSynchronize"); HOST_WAITS(stream, NULL); return 0; }
int cudaDeviceSynchronize(void) { COUNT("cudaDeviceSynchronize"); HOST_WAITS((void *)DEVICE, NULL); return 0; }
int cuCtxSynchronize(void) { COUNT("cuCtxSynchronize"); HOST_WAITS((void *)DEVICE, NULL); return 0; }
int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    COUNT("cudaLaunchHostFunc");
    (void)stream;
    return function(data), 0;
}

/* Events are kept when they are destroyed, so that a record has each address once. */
static int create_event(void **event) { return (*event = calloc(1, sizeof(Event))) ? 0 : OUT_OF_MEMORY; }
int cudaEventCreate(void **event) { COUNT("cudaEventCreate"); return create_event(event); }
int cudaEventCreateWithFlags(void **event) { COUNT("cudaEventCreateWithFlags"); return create_event(event); }
int cuEventCreate(void **event) { COUNT("cuEventCreate"); return create_event(event); }
NOTHING(cudaEventDestroy)
NOTHING(cuEventDestroy_v2)
static int record_event(Call *call, Event *event, void *stream) {
    event->time = now(), event->stream = (uint64_t)stream;
    append(call, EVENT_RECORD, stream, (Entry){.object = (uint64_t)event});
    return 0;
}
int cudaEventRecord(Event *event, void *stream) { COUNT("cudaEventRecord"); return record_event(&call, event, stream); }
int cudaEventRecordWithFlags(Event *event, void *stream) { COUNT("cudaEventRecordWithFlags"); return record_event(&call, event, stream); }
int cuEventRecord(Event *event, void *stream) { COUNT("cuEventRecord"); return record_event(&call, event, stream); }
int cudaEventQuery(Event *event) { COUNT("cudaEventQuery"); RECORD(QUERY, (void *)event->stream, .object = (uint64_t)event); return 0; }
int cudaEventSynchronize(Event *event) {
    COUNT("cudaEventSynchronize");
    HOST_WAITS((void *)event->stream, event);
    return 0;
}
int cudaStreamWaitEvent(void *stream, Event *event, unsigned flags) {
    COUNT("cudaStreamWaitEvent");
    (void)flags;
    RECORD(STREAM_WAIT, stream, .object = (uint64_t)event, .source = event->stream);
    return 0;
}
int cudaEventElapsedTime(float *ms, const Event *begin, const Event *end) {
    COUNT("cudaEventElapsedTime");
    double elapsed = (end->time - begin->time) * 1e-6;
    return *ms = elapsed > 1e-3 ? elapsed : 1e-3, 0; /* not zero: benchmarks divide by it */
}
