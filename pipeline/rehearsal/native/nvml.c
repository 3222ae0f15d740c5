/* NVML, the library of nvidia-smi: PyTorch asks it for NVLink and for other processes. There are none. */
int nvmlInit(void) { COUNT("nvmlInit"); return 0; }
int nvmlInit_v2(void) { COUNT("nvmlInit_v2"); return 0; }
NOTHING(nvmlShutdown)
int nvmlDeviceGetCount_v2(unsigned *n) { COUNT("nvmlDeviceGetCount_v2"); return *n = 1, 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { COUNT("nvmlSystemGetCudaDriverVersion_v2"); return *version = CUDA_VERSION, 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { COUNT("nvmlDeviceGetHandleByPciBusId_v2"); (void)id; return *device = (void *)16, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { COUNT("nvmlDeviceGetHandleByIndex_v2"); return *device = (void *)16, index ? 2 : 0; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *n) { COUNT("nvmlDeviceGetComputeRunningProcesses"); (void)device; return *n = 0, 0; }
typedef struct { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } FabricInfo;
int nvmlDeviceGetGpuFabricInfoV(void *device, FabricInfo *info) {
    COUNT("nvmlDeviceGetGpuFabricInfoV");
    (void)device;
    return info->status = 3, info->state = 0, 0; /* a GPU without a fabric */
}
/* No links: "not supported". */
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { COUNT("nvmlDeviceGetNvLinkRemoteDeviceType"); return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { COUNT("nvmlDeviceGetNvLinkRemotePciInfo_v2"); return 3; }
