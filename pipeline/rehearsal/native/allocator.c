/* The caching allocator of PyTorch tells its profiler of every block that becomes a tensor's or comes back: this function stands before the
 * profiler's, which is called as well. */
struct TorchDevice { signed char type, index; };
void _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE(void *p, int64_t size, size_t allocated, size_t reserved, struct TorchDevice device) {
    COUNT("c10::reportMemoryUsageToProfiler");
    static void (*profiler)(void *, int64_t, size_t, size_t, struct TorchDevice);
    if (!profiler) profiler = dlsym(RTLD_NEXT, "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE");
    if (on_device(p)) {
        uint64_t bytes = size < 0 ? -size : size;
        forget((uint64_t)p, bytes);
        RECORD(size < 0 ? TENSOR_FREE : TENSOR_ALLOCATE, NULL, .object = (uint64_t)p, .size = bytes, .source = allocated);
    }
    if (profiler) profiler(p, size, allocated, reserved, device);
}
