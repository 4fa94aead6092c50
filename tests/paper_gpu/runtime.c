/* CUDA driver and runtime of a GPU that does not exist, for torch on a machine without one. Preloaded, and also built as
   libcuda.so.1. Only the functions that torch calls without launching a kernel; others reach the real runtime, which
   fails without a driver. The machine is described by environment variables:
   PAPER_GPUS: number of GPUs (default 1). PAPER_GPU_CAPABILITY: such as 90.
   PAPER_GPU_NAME: name of the GPUs, or names of the first ones with commas between them; the last is that of all others.
   PAPER_DRIVER: CUDA version of the driver, such as 12080 (default: that of the runtime).
   PAPER_FAIL_AFTER, PAPER_FAIL_WITH: waits for the device that succeed, and CUDA's error of all later ones.
   PAPER_CALLS: file to which the name of each call is appended. */
#include <driver_types.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void called(const char *name) {
  const char *path = getenv("PAPER_CALLS");
  int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0644) : -1;
  if (file < 0) return;
  char line[128];
  size_t length = strlen(name);
  memcpy(line, name, length);
  line[length] = '\n';
  if (write(file, line, length + 1) < 0) _exit(1);
  close(file);
}
#define CALLED called(__func__)

static int number(const char *name, int otherwise) {
  const char *value = getenv(name);
  return value && *value ? atoi(value) : otherwise;
}

/* Result of a call that waits for the device: a GPU that has failed once fails for the rest of the process. */
static cudaError_t waited(void) {
  static int waits = 0;
  int allowed = number("PAPER_FAIL_AFTER", -1);
  return allowed >= 0 && __sync_add_and_fetch(&waits, 1) > allowed ? number("PAPER_FAIL_WITH", 999) : cudaSuccess;
}

/* GPU of a name in CUDA_VISIBLE_DEVICES: a number, GPU-2 for a UUID, MIG-2-1 for a slice of GPU 2; -1 if there is none. */
static int gpu_of(const char *name) {
  if (!strncmp(name, "GPU-", 4) || !strncmp(name, "MIG-", 4)) name += 4;
  char *end;
  long gpu = strtol(name, &end, 10);
  return end == name || gpu < 0 || gpu >= number("PAPER_GPUS", 1) ? -1 : (int)gpu;
}

/* GPU of a device that the process sees; -1 behind the last one. CUDA shows a process one MIG slice, the first. */
static int visible_gpu(int device) {
  const char *chosen = getenv("CUDA_VISIBLE_DEVICES");
  if (!chosen) return device < number("PAPER_GPUS", 1) ? device : -1;
  if (!*chosen || (device && !strncmp(chosen, "MIG-", 4))) return -1;
  for (; gpu_of(chosen) >= 0; device--) {
    if (!device) return gpu_of(chosen);
    const char *comma = strchr(chosen, ',');
    if (!comma) return -1;
    chosen = comma + 1;
  }
  return -1;
}

static int visible(void) {
  int seen = 0;
  while (visible_gpu(seen) >= 0) seen++;
  return seen;
}

/* The driver. */
int cuInit(unsigned flags) { CALLED; return visible() ? 0 : 100; }
int cuDriverGetVersion(int *version) { CALLED; *version = number("PAPER_DRIVER", CUDART_VERSION_OF_BUILD); return 0; }
int cuDeviceGetCount(int *count) { CALLED; *count = visible(); return 0; }
int cuDeviceGet(int *device, int ordinal) { CALLED; *device = ordinal; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { CALLED; *flags = 0; *active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { CALLED; *context = (void *)1; return 0; }
int cuCtxGetCurrent(void **context) { CALLED; *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { CALLED; return 0; }
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags, void *status) {
  CALLED; *function = 0; return 500;
}

/* The runtime. */
static __thread int current_device = 0;
cudaError_t cudaGetDeviceCount(int *count) {
  CALLED;
  *count = 0;
  if (number("PAPER_DRIVER", CUDART_VERSION_OF_BUILD) / 1000 < CUDART_VERSION_OF_BUILD / 1000)
    return cudaErrorInsufficientDriver;
  *count = visible();
  return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int *device) { CALLED; *device = current_device; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  CALLED;
  if (device < 0 || device >= visible()) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  CALLED;
  int capability = number("PAPER_GPU_CAPABILITY", 90);
  const char *name = getenv("PAPER_GPU_NAME");
  if (!name) name = "NVIDIA H100 80GB HBM3";
  for (int gpu = visible_gpu(device); gpu > 0 && strchr(name, ','); gpu--) name = strchr(name, ',') + 1;
  memset(properties, 0, sizeof *properties);
  strncpy(properties->name, name, sizeof properties->name - 1);
  properties->name[strcspn(properties->name, ",")] = 0;
  properties->major = capability / 10, properties->minor = capability % 10;
  properties->totalGlobalMem = 80ul << 30, properties->multiProcessorCount = 132, properties->warpSize = 32;
  properties->regsPerMultiprocessor = 65536, properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlockOptin = 232448;
  properties->pciBusID = 1 + visible_gpu(device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  CALLED;
  int capability = number("PAPER_GPU_CAPABILITY", 90);
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? capability / 10
         : attribute == cudaDevAttrComputeCapabilityMinor ? capability % 10 : 0;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { CALLED; return cuDriverGetVersion(version); }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  CALLED; *least = 0, *greatest = -5; return cudaSuccess;
}
static int not_supported(void) { return 801; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  called(name);
  *function = strcmp(name, "cuDeviceGet") ? (void *)not_supported : (void *)cuDeviceGet;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetLastError(void) { CALLED; return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { CALLED; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  CALLED; *status = cudaStreamCaptureStatusNone; return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { CALLED; return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { CALLED; *free = *total = 80ul << 30; return cudaSuccess; }
cudaError_t cudaMalloc(void **memory, size_t bytes) { CALLED; *memory = malloc(bytes); return cudaSuccess; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { CALLED; *pool = 0; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { CALLED; *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
  CALLED; strncpy(id, "0000:01:00.0", length); return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { CALLED; *version = CUDART_VERSION_OF_BUILD; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  CALLED; *stream = (cudaStream_t)malloc(1); return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  CALLED; *event = (cudaEvent_t)malloc(1); return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { CALLED; return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { CALLED; return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) { CALLED; return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { CALLED; return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { CALLED; return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { CALLED; return waited(); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { CALLED; return waited(); }
cudaError_t cudaDeviceSetLimit(enum cudaLimit limit, size_t value) { CALLED; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  CALLED; *status = cudaStreamCaptureStatusNone; return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result) {
  CALLED; *function = 0; if (result) *result = cudaDriverEntryPointSymbolNotFound; return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags) { CALLED; *memory = malloc(bytes); return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { CALLED; return waited(); }
cudaError_t cudaFree(void *memory) { CALLED; return cudaSuccess; }
